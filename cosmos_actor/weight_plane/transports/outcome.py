"""What an event loop waits for that a thread brings."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Outcome(Generic[T]):
    """One result or error, from any thread to the event loop that made this. After `leave` nothing comes of it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[T] = self._loop.create_future()

    @property
    def there(self) -> bool:
        return self._result.done()

    async def wait(self, timeout_s: float) -> bool:
        """Whether it is there after at most so long."""
        await asyncio.wait([self._result], timeout=timeout_s)
        return self._result.done()

    def take(self) -> T:
        """The result, or raises the error. Only when it is `there`."""
        return self._result.result()

    def leave(self) -> None:
        """Nobody waits any more: asyncio is not to complain of an error that nobody saw."""
        if not self._result.cancel() and not self._result.cancelled():
            self._result.exception()

    def bring(self, result: T) -> None:
        self._in_loop(result, None)

    def fail(self, error: BaseException) -> None:
        self._in_loop(None, error)

    def _in_loop(self, result: T | None, error: BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._set, result, error)
        except RuntimeError:
            pass  # The event loop was closed: nobody waits any more.

    def _set(self, result: T | None, error: BaseException | None) -> None:
        if self._result.done():
            return
        if error is not None:
            self._result.set_exception(error)
        else:
            self._result.set_result(cast(T, result))
