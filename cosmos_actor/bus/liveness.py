"""Whether a peer still works. Pure: heard things and the time in, a verdict out.

Silence while our own loop stood still is not held against the peer: nobody was listening.
A peer that declared a pause (compiling, a checkpoint) is waited for until the pause it named is over.
"""

from __future__ import annotations

from typing import Dict, Optional


class Liveness:
    """``lost`` is None until the peer was silent for `lost_after_s` that we were listening in."""

    def __init__(self, now: float, *, interval_s: float, lost_after_s: float) -> None:
        self._interval_s = interval_s
        self._lost_after_s = lost_after_s
        self._heard = now
        self._looked = now
        self._said = now - interval_s
        self._busy_until = now
        self.busy_label = ""
        self.progress = 0

    def heard(self, now: float) -> None:
        """Any whole frame of the peer came."""
        self._heard = now

    def pulse(self, now: float, progress: int, busy_s: float, label: str) -> None:
        """The peer's heartbeat, which says what its loop has done and how long it wants to be left alone."""
        self._heard = now
        self.progress = progress
        self._busy_until = now + busy_s
        self.busy_label = label if busy_s > 0 else ""

    def look(self, now: float) -> None:
        """We are listening at this time. Call it about every interval."""
        stalled = now - self._looked - 2 * self._interval_s
        if stalled > 0:
            self._heard += stalled
        self._looked = now

    def lost(self, now: float) -> Optional[str]:
        """The reason for giving the peer up, or None."""
        silent_s = self.unexcused_s(now)
        if silent_s < self._lost_after_s:
            return None
        pause = f" after its pause for {self.busy_label}" if self.busy_label else ""
        return f"no frame for {silent_s:.1f} s{pause} (bus.lost_after_s is {self._lost_after_s:g})"

    def due(self, now: float) -> bool:
        """Whether it is time for our own heartbeat; True at most once an interval."""
        if now - self._said < self._interval_s:
            return False
        self._said = now
        return True

    def silent_s(self, now: float) -> float:
        return max(0.0, now - self._heard)

    def unexcused_s(self, now: float) -> float:
        """Silence that no declared pause covers."""
        return max(0.0, now - max(self._heard, self._busy_until))

    def statistics(self, now: float) -> Dict[str, object]:
        busy_s = max(0.0, self._busy_until - now)
        return {"silent_s": self.silent_s(now), "progress": self.progress, "busy_s": busy_s, "busy": self.busy_label}
