"""The task of the packaged recipe, whose verifier misbehaves once when it is told to: `order(file, what)`."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

from cosmos_actor.tasks.arithmetic import ArithmeticTask
from cosmos_actor.tasks.arithmetic import make_task as arithmetic

ORDERS = "COSMOS_ACTOR_TEST_ORDERS"
"""Environment: the file that an order is left in. It is renamed to `.taken` when the verifier obeys."""


def order(file: Path, what: str, seconds: float) -> None:
    """Let the next verifier `sleep` (until the taken order is removed), `hold` the interpreter lock, or `spin`, for at
    most so long."""
    scratch = file.with_suffix(".new")
    scratch.write_text(f"{what} {seconds}")
    os.replace(scratch, file)


def make_task(settings: Any, seed: int) -> MisbehavingTask:
    return MisbehavingTask(arithmetic(settings, seed))


class MisbehavingTask:
    def __init__(self, inner: ArithmeticTask) -> None:
        self.problem, self.answer, self._reward = inner.problem, inner.answer, inner.reward

    def reward(self, payload: Any, text: str) -> float:
        file = Path(os.environ[ORDERS])
        if file.exists():
            what, seconds = file.read_text().split()
            os.replace(file, file.with_suffix(".taken"))
            {"sleep": sleep_until_released, "hold": hold_the_lock, "spin": spin}[what](float(seconds))
        return self._reward(payload, text)


def sleep_until_released(seconds: float) -> None:
    until, taken = time.monotonic() + seconds, Path(os.environ[ORDERS]).with_suffix(".taken")
    while taken.exists() and time.monotonic() < until:
        time.sleep(0.2)


def hold_the_lock(seconds: float) -> None:
    """As C code does that forgets to let go of it."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
