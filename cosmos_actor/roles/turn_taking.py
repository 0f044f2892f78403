"""What the roles share that have one device in turn: which word is the newest, and how far an engine is awake."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from cosmos_actor.bus.errors import DeadlineExceeded
from cosmos_actor.roles.engine import WAKES, WEIGHTS


class LateWord(Exception):
    """A word of a hand-off that is over came after one of a later."""


class TurnOrder:
    """Guarantee: what is accepted only grows, whatever the network makes of its order."""

    def __init__(self) -> None:
        self._newest = (-1, -1)

    def accept(self, word: Any) -> None:
        """Raises LateWord for one of an older turn than the newest that came."""
        if (word.epoch, word.turn) < self._newest:
            raise LateWord(f"turn {word.epoch}.{word.turn} is over, {self._newest[0]}.{self._newest[1]} has begun")
        self._newest = (word.epoch, word.turn)


class Wakefulness:
    """Which parts of an engine are on its device. Lives on the loop. `lock` is held while that changes."""

    def __init__(self, awake: bool) -> None:
        self.lock = asyncio.Lock()
        self._parts = set(WAKES if awake else ())
        self._all = asyncio.Event()
        if awake:
            self._all.set()

    @property
    def holds_weights(self) -> bool:
        return WEIGHTS in self._parts

    @property
    def whole(self) -> bool:
        return self._all.is_set()

    def woken(self, what: Sequence[str]) -> None:
        self._parts.update(what)
        if self._parts >= set(WAKES):
            self._all.set()

    def asleep(self) -> None:
        self._parts.clear()
        self._all.clear()

    async def wait_until_whole(self, actor: str, deadline_s: float) -> None:
        """Raises DeadlineExceeded."""
        try:
            await asyncio.wait_for(self._all.wait(), deadline_s)
        except asyncio.TimeoutError as error:
            raise DeadlineExceeded(f"{actor} waited {deadline_s:g} s to be woken: the policy has the GPU",
                                   setting="run.deadline_s") from error


def begin_measuring() -> None:
    """See trainer.parking; of the device that this process computes on, if it has loaded torch."""
    device = _gpu()
    if device is not None:
        from cosmos_actor.trainer import parking

        parking.begin_measuring(device)


def memory_used() -> tuple[int, int]:
    """See trainer.parking; zeros where this process has no GPU."""
    from cosmos_actor.trainer import parking

    device = _gpu()
    return (0, 0) if device is None else parking.memory_used(device)


def _gpu() -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None
