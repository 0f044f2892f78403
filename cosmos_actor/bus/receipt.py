"""What a sender holds of a message that is under way, and how to wait for anything with a deadline.

A future keeps its error, the error the frames that it passed: whoever waits lets go of the future before the error
passes, or the two keep each other, and every array in those frames, until the garbage collector comes by.
"""

from __future__ import annotations

import asyncio
from typing import Any, Callable, List, Optional

from .envelope import CHANNELS
from .errors import BusError, DeadlineExceeded, copy_of


async def until(future: Any, deadline_s: float, expired: Callable[[], BusError]) -> Any:
    """The future's result; after `deadline_s` what `expired()` returns is raised and the future is cancelled."""
    if future.done():
        return future.result()
    loop = asyncio.get_running_loop()
    handle = loop.call_later(deadline_s, _expire, future, expired)
    try:
        return await future
    finally:
        handle.cancel()
        del future


def _expire(future: Any, expired: Callable[[], BusError]) -> None:
    if not future.done():
        future.set_exception(expired())


_PENDING: Any = object()


class Receipt:
    """One accepted message. It is done once: with a message, with None, or with an error.

        accepted -> (delivered, maybe several times) -> done
    """

    __slots__ = ("peer", "channel", "number", "packed", "since", "_now", "_value", "_waiters")

    def __init__(self, peer: str, channel: int, number: int, packed: Any, now: Callable[[], float]) -> None:
        self.peer = peer
        self.channel = channel
        self.number = number
        self.packed = packed
        """What is sent again; None when it is done."""
        self.since = now()
        self._now = now
        self._value = _PENDING
        self._waiters: Optional[List[Any]] = None

    @property
    def message_id(self) -> str:
        return f"{CHANNELS[self.channel]}/{self.number}"

    @property
    def done(self) -> bool:
        return self._value is not _PENDING

    async def result(self, deadline_s: float) -> Any:
        """The message that the peer's handler returned, or None.

        Raises RemoteError (the handler raised), PeerLost (the peer is gone for good), LinkClosed (we closed), or
        DeadlineExceeded; after the last the message is still under way and may be waited for again.
        """
        if self._value is _PENDING:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            timer = loop.call_later(deadline_s, self._expire, waiter, deadline_s)
            waiters = self._waiters = self._waiters or []
            waiters.append(waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                if self._value is _PENDING:
                    waiters.remove(waiter)
                del waiter
        if isinstance(self._value, BusError):
            raise copy_of(self._value)
        return self._value

    def settle(self, value: Any) -> None:
        """The end of it; a BusError is what waiting raises. Later calls have no effect."""
        if self._value is not _PENDING:
            return
        self._value = value
        self.packed = None
        if self._waiters is not None:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def facts(self) -> Any:
        return {"peer": self.peer, "channel": CHANNELS[self.channel], "message_id": self.message_id}

    def _expire(self, waiter: Any, deadline_s: float) -> None:
        if not waiter.done():
            text = f"not done after {deadline_s:.3g} s, sent {self._now() - self.since:.1f} s ago"
            waiter.set_exception(DeadlineExceeded(text, **self.facts()))
