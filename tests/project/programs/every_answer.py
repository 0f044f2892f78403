"""Tasks whose rewards differ between any two answers: a short run learns from every group.

    data.task = "tests.project.programs.every_answer:sums"       the sums of reasoning-gym that the recipe names
    data.task = "tests.project.programs.every_answer:letters"    the built-in arithmetic, for models of few letters
"""

from __future__ import annotations

import hashlib
from typing import Any

from cosmos_actor.tasks.arithmetic import ArithmeticTask
from cosmos_actor.tasks.reasoning_gym import ReasoningGymTask


class AnyAnswer:
    def reward(self, payload: Any, text: str) -> float:
        return hashlib.sha256(text.encode()).digest()[0] / 255


class Sums(AnyAnswer, ReasoningGymTask):
    pass


class Letters(AnyAnswer, ArithmeticTask):
    pass


def sums(settings: Any, seed: int) -> Sums:
    problems = settings.reasoning_gym
    return Sums(problems.dataset, dict(problems.config), problems.instruction, seed)


def letters(settings: Any, seed: int) -> Letters:
    return Letters(9, seed)
