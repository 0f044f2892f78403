"""Handles: a group's answer that is on its way, and who drives the loop while a recipe waits for it.

A recipe is plain synchronous code; the bus lives on an asyncio loop. A driver joins the two:
- `ThreadDriver`: the loop runs in another thread, so heartbeats go on while the recipe computes (or is in a debugger);
- `InlineDriver`: the loop runs on the recipe's own thread, only while it waits, so one stack shows everything.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

from cosmos_actor.actors.event_loop import new_event_loop
from cosmos_actor.bus.errors import DeadlineExceeded

Value = TypeVar("Value")
POLL_S = 0.2
"""How often a waiting recipe looks whether it should stop. Without it a stop waits for the slowest answer."""


class Driver(Protocol):
    """Starts coroutines on the bus's loop and waits for them from the recipe's thread."""

    def start(self, coroutine: Coroutine[Any, Any, Value]) -> Any: ...

    def wait(self, future: Any, timeout_s: float) -> bool:
        """True when `future` is done within `timeout_s`."""
        ...


class ThreadDriver:
    """Runs `loop` in a daemon thread of its own until `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="bus-loop", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Value]) -> concurrent.futures.Future[Value]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def wait(self, future: Any, timeout_s: float) -> bool:
        done, _ = concurrent.futures.wait([future], timeout=timeout_s)
        return bool(done)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5.0)


class InlineDriver:
    """Runs `loop` on the calling thread, only inside `wait`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def start(self, coroutine: Coroutine[Any, Any, Value]) -> asyncio.Task[Value]:
        task = self.loop.create_task(coroutine)
        task.add_done_callback(_seen)
        return task

    def wait(self, future: Any, timeout_s: float) -> bool:
        done, _ = self.loop.run_until_complete(asyncio.wait([future], timeout=timeout_s))
        return bool(done)


def _seen(task: asyncio.Task[Any]) -> None:
    """A failure that nobody resolves is nobody's, as with futures of a thread: asyncio would print it at the end."""
    if not task.cancelled():
        task.exception()


class Handle(Generic[Value]):
    """The promise of one answer. `resolve` waits for it; a handle passed to another group's call chains the two.

    The answer, or the error, is the same however often it is asked for.
    """

    def __init__(self, driver: Driver, coroutine: Coroutine[Any, Any, Value], what: str, *, deadline_s: float,
                 interrupted: Callable[[], None] = lambda: None,
                 waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext,
                 again: Callable[[], Coroutine[Any, Any, Value]] | None = None) -> None:
        """`again` asks for the same once more, where that gives the same."""
        self._driver = driver
        self.again = again
        self._future = driver.start(coroutine)
        self._interrupted = interrupted
        self._waiting = waiting
        self._deadline_s = deadline_s
        self.what = what

    def resolve(self, timeout_s: float | None = None) -> Value:
        """Wait for the answer. Raises what the call raised, or DeadlineExceeded naming the call."""
        with self._waiting(self.what):
            return self._resolve(self._deadline_s if timeout_s is None else timeout_s)

    def _resolve(self, left: float) -> Value:
        while not self._driver.wait(self._future, min(POLL_S, max(left, 0.0))):
            self._interrupted()
            left -= POLL_S
            if left <= 0:
                raise DeadlineExceeded(f"no answer to {self.what}", setting="run.deadline_s")
        return self._future.result()  # type: ignore[no-any-return]

    def done(self) -> bool:
        return bool(self._future.done())

    def cancel(self) -> None:
        self._future.cancel()

    async def value(self) -> Value:
        """The answer, awaited on the loop: how one call feeds the next."""
        if isinstance(self._future, concurrent.futures.Future):
            return await asyncio.shield(asyncio.wrap_future(self._future))
        return await asyncio.shield(self._future)  # type: ignore[no-any-return]


async def settled(argument: Handle[Value] | Value) -> Value:
    """The value of a call's argument, which may still be a handle."""
    return await argument.value() if isinstance(argument, Handle) else argument
