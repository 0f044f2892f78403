"""When a simulator is to say that it will not be heard for a while. Pure: what begins and ends, and the time, come in.

Legend: n slots of a call. Calls of one kind take a time that grows with n.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, Optional, Tuple

SLOW_S = 0.5
"""A call that took longer is announced from then on. Shorter ones are over before anybody counts the silence, and an
announcement before each step of a quick simulator would cost more than its step."""
FIRST_S = 60.0
"""A slot, for what it never did before: assets are loaded, kernels are compiled, renderers are started."""
BEAT_S = 0.25
"""Between two words that a request goes on: a chunk is many calls, none of them slow, and no loop turns meanwhile."""
MARGIN = 4.0
"""Times the slowest so far: what is late by more than that hangs."""


class Pace:
    """Every call that may be slow is announced before it begins, and what was announced is taken back when it ends.

    One of a kind that was never made may be, and one that is the first for a slot and a task: each slot has a world of
    its own to open. So may any after one of its kind has been slow. Between calls `beat()` is called now and then, so
    that many quick ones in a row are no silence either.
    """

    def __init__(self, declare: Callable[[str, float], None] = lambda label, expected_s: None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`declare(label, seconds)` is heard by whoever waits; 0 seconds take it back."""
        self.declare = declare
        self.beat: Callable[[], None] = lambda: None
        self._clock = clock
        self._beat_at = 0.0
        self._slowest: Dict[str, float] = {}
        """Kind -> seconds a slot."""
        self._begun: Optional[Tuple[str, int, float]] = None
        self._declared = False

    def __call__(self, kind: str, *more: str, slots: int = 1, first: bool = False) -> Pace:
        """`with pace("reset", task, slots=n, first=whether one of the slots is new to its task): ...`"""
        now = self._clock()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self.beat()
        slowest = self._slowest.get(kind)
        if first or slowest is None or slowest * slots > SLOW_S:
            self.declare(" ".join((kind, *more)), self.expected_s(kind, slots, first) or 0.0)
            self._declared = True
        self._begun = kind, slots, now
        return self

    def expected_s(self, kind: str, slots: int = 1, first: bool = False) -> Optional[float]:
        """How long it is to be waited for, or None: it is quick."""
        slowest = self._slowest.get(kind)
        if slowest is None:
            return FIRST_S * slots
        known = MARGIN * slowest * slots
        return max(FIRST_S * slots, known) if first else known if slowest * slots > SLOW_S else None

    def __enter__(self) -> None:
        return None

    def __exit__(self, *raised: Any) -> None:
        if self._begun is not None:
            (kind, slots, begun), self._begun = self._begun, None
            slot_s = (self._clock() - begun) / slots
            if slot_s > self._slowest.get(kind, -1.0):
                self._slowest[kind] = slot_s
        if self._declared:
            self._declared = False
            self.declare("", 0.0)
