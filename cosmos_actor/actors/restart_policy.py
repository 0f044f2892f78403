"""Whom to start again, how soon, and when to give up: the rules of OTP's supervisor. Pure.

Source: Erlang/OTP stdlib, `supervisor` (restart intensity and period, strategies, restart types). Back-off is ours: OTP
restarts at once, which a process that takes seconds to load would turn into a busy loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """How a process ended, as far as the policy cares."""

    NORMAL = "normal"
    SHUTDOWN = "shutdown"
    ABNORMAL = "abnormal"


class Restart(Enum):
    """When a child that ended by itself is started again: always; unless it ended well; never."""

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    TEMPORARY = "temporary"

    def after(self, outcome: Outcome) -> bool:
        if self is Restart.TRANSIENT:
            return outcome is Outcome.ABNORMAL
        return self is Restart.PERMANENT


class Strategy(Enum):
    """Who is started again with the child that ended."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"

    def group(self, order: Sequence[str], failed: str) -> list[str]:
        """`failed` and whoever shares its fate, in start order."""
        if self is Strategy.ONE_FOR_ONE:
            return [failed]
        first = 0 if self is Strategy.ONE_FOR_ALL else list(order).index(failed)
        return list(order[first:])


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """How much restarting is tolerated. More than `intensity` restarts within `period_s` end the supervisor."""

    intensity: int = 5
    # restarts in all; a job whose actors die more often makes no progress and should say so
    period_s: float = 120.0
    # s; longer than a few cold starts, or a crash loop of slow starters would never be seen
    back_off_first_s: float = 0.5
    # s before an actor's second restart within a period (the first is at once); doubles with each further one
    back_off_most_s: float = 15.0
    # s; keeps the wait of a person who has mended the cause short
    stop_s: float = 30.0
    # s for a whole stop; whoever is left then is killed

    def __post_init__(self) -> None:
        if self.intensity < 0 or self.period_s <= 0 or self.stop_s <= 0:
            raise ValueError(f"intensity >= 0, period_s > 0 and stop_s > 0 are needed, got {self}")

    def back_off_s(self, restarts: int) -> float:
        """The wait before restart number `restarts` (from 1) of one actor within a period."""
        if restarts <= 1:
            return 0.0
        return min(self.back_off_most_s, self.back_off_first_s * 2.0 ** min(restarts - 2, 30))


class RestartWindow:
    """Counts restarts within the period that ends now; both edges belong to it, as in OTP's `add_restart`."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._times: deque[float] = deque()

    def add(self, now: float) -> int:
        """Note a restart; how many there are within the period, this one included."""
        self._times.append(now)
        while self._times[0] < now - self._period_s:
            self._times.popleft()
        return len(self._times)
