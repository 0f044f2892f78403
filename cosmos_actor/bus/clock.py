"""The one place where the bus reads the time."""

from __future__ import annotations

import time


class Clock:
    """Seconds that only grow. Tests and playback put their own in its place."""

    now = staticmethod(time.monotonic)
