"""Waiting for real things in tests: always with a deadline, and with a name for what did not come."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
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


def stop(pid: int) -> None:
    """Send SIGSTOP, and come back when all its threads stand: until then it may answer once more, and dies of a
    SIGTERM."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: set(map(_state, Path(f"/proc/{pid}/task").iterdir())) == {"T"}, f"the stop of process {pid}")


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
