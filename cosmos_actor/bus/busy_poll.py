"""Keeps a loop from going to sleep for a moment: waking a processor that sleeps can cost more than the answer did.

    begin -> turning -> heard: it was worth it
                     -> nothing came, or the processor was wanted by others: no more for a pause, doubled each time
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, Callable

CONTENDED_S = 0.0005
"""Who gets the processor back so late shares it with others that compute; who sleeps is let in sooner than that."""

CONTENDED_FIRST_S = 0.002
"""The first pause, unless one came shortly before. On a virtual machine a single late return is as often the host's
doing: with 20 ms sixteen CartPoles over a lone lane were 0.6 times as quick as in a loop, with this 0.65 to 0.78."""

CONTENDED_LAST_S = 0.5
"""Pauses grow to this while it stays so: each try costs the rest of somebody's time slice, and what was turned in vain
is taken off one's own share. With ten processes on two cores, simulators that never turned were half as quick again."""

PAUSE_FIRST_S, PAUSE_LAST_S = 0.001, 0.02

LOOKS = 100
"""Between two system calls of a spin: 10 µs. After a call of the kernel, code runs some percent slower for a while."""


class BusyPoll:
    """The loop turns without sleeping, and serves whatever comes, until `seconds` after the last `begin`."""

    def __init__(self, seconds: float) -> None:
        """0: it sleeps as ever."""
        self.seconds = seconds
        self._until = 0.0
        self._not_before = 0.0
        self._pause_s = PAUSE_FIRST_S
        self._turning = self._heard = False
        self._contended_s = self._calm_from = 0.0

    def begin(self) -> None:
        """A message went out whose answer may come within microseconds."""
        if not self.seconds:
            return
        now = time.monotonic()
        if now < self._not_before:
            return
        self._until = now + self.seconds
        self._heard = False
        if not self._turning:
            self._turning = True
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._turn)

    def heard(self) -> None:
        """A message came."""
        if self._turning:
            self._heard = True
            self._pause_s = PAUSE_FIRST_S

    def _turn(self) -> None:
        begun = time.monotonic()
        if begun < self._until:
            os.sched_yield()  # the peer may be waiting for this very processor
            back = time.monotonic()
            if back - begun < CONTENDED_S:
                self._loop.call_soon(self._turn)
                return
            self._contended(back)
        elif not self._heard:
            self._in_vain()
        self._turning = False

    def spin(self, ready: Callable[[], Any], more_s: float = 0.0) -> bool:
        """The same without the loop, which has no turn meanwhile: whether `ready()`. It is to be a look at memory.

        `more_s`: that much longer. A processor that comes back late, but with what was waited for, was with the peer.
        """
        if ready():
            self._pause_s = PAUSE_FIRST_S
            return True
        now = time.monotonic()
        if now < self._not_before or not self.seconds:
            return False
        until = now + self.seconds + more_s
        while now < until:
            for _ in range(LOOKS):
                if ready():
                    self._pause_s = PAUSE_FIRST_S
                    return True
            before = time.monotonic()
            os.sched_yield()
            now = time.monotonic()
            if now - before >= CONTENDED_S and not ready():
                self._contended(now)
                return False
        self._in_vain()
        return False

    def _contended(self, now: float) -> None:
        """A longer pause each time, unless it was calm for as long as the last pause."""
        calm = now >= self._calm_from
        self._contended_s = CONTENDED_FIRST_S if calm else min(2 * self._contended_s, CONTENDED_LAST_S)
        self._not_before = now + self._contended_s
        self._calm_from = self._not_before + self._contended_s

    def _in_vain(self) -> None:
        self._not_before = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_LAST_S)
