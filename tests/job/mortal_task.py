"""Tasks for real jobs in which judging one problem goes wrong; `data.task = "tests.job.mortal_task:poisoned"`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from cosmos_actor.tasks.arithmetic import ArithmeticTask

BAD_INDEX = 41
"""Of the problems that are drawn for training: with 8 prompts a step the second one of step 6."""


class Poisoned(ArithmeticTask):
    """Judging one problem kills the process that does it."""

    def __init__(self, seed: int) -> None:
        super().__init__(9, seed)

    def problem(self, split: str, index: int) -> tuple[str, dict[str, Any]]:
        prompt, payload = super().problem(split, index)
        return prompt, {**payload, "bad": split == "train" and index == BAD_INDEX}

    def reward(self, payload: Any, text: str) -> float:
        if payload["bad"]:
            self.trouble()
        return super().reward(payload, text)

    def trouble(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Slow(Poisoned):
    """Judging one problem takes SLOW_S seconds the first time; where SLOW_MARK is, it was judged before."""

    def trouble(self) -> None:
        try:
            Path(os.environ["SLOW_MARK"]).touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(float(os.environ["SLOW_S"]))


def poisoned(settings: Any, seed: int) -> Poisoned:
    return Poisoned(seed)


def slow(settings: Any, seed: int) -> Slow:
    return Slow(seed)
