"""An event loop whose clock jumps: an hour of waiting takes no time, and the same program does the same every time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

TURNS_WITHOUT_TIME = 50_000


class NothingWillHappen(Exception):
    """Everybody waits and no timer is set: a real loop would hang for ever."""


class TimeStandsStill(Exception):
    """The program is busy without an end: a real loop would burn its processor."""


class _Jump:
    """Stands where a loop asks the kernel what happened: time passes at once instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.turns = 0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise NothingWillHappen
        self.turns = 0 if timeout > 0 else self.turns + 1
        if self.turns > TURNS_WITHOUT_TIME:
            self.turns = 0
            raise TimeStandsStill
        self.loop.elapsed_s += max(0.0, timeout)
        return []

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """No sockets, no threads, no signals: tasks and timers only."""

    def __init__(self) -> None:
        super().__init__()
        self.elapsed_s = 0.0
        self._selector = _Jump(self)

    def time(self) -> float:
        return self.elapsed_s

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run(program: Coroutine[Any, Any, Any], *, limit_s: float) -> Any:
    """The program's result. TimeoutError after `limit_s` of virtual time."""
    loop = VirtualLoop()
    asyncio.set_event_loop(None)
    try:
        return loop.run_until_complete(asyncio.wait_for(program, limit_s))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
