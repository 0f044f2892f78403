"""Waiting for real things in tests: always with a deadline, and with a name for what did not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LOOK_S = 0.01


def eventually(look: Callable[[], T], what: str, *, within_s: float = 10.0) -> T:
    """The first true value of `look`. Fails the test, naming `what`, when none came in time."""
    until = time.monotonic() + within_s
    while not (value := look()):
        assert time.monotonic() < until, f"{what} did not happen within {within_s:g} s"
        time.sleep(LOOK_S)
    return value
