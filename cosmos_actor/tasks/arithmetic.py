"""Sums of two numbers: made by seed and index, judged exactly.

A fixed sixteenth of all sums, chosen by a hash of the sum itself, is held out: "train" never draws one of them and
"held_out" draws nothing else, whatever the seed.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

HELD_OUT_OF = 16
SPLITS = ("train", "held_out")


class ArithmeticTask:
    """Implements roles.task.Task. The same seed, split and index give the same sum."""

    def __init__(self, largest: int, seed: int) -> None:
        """Raises ValueError when so few numbers leave a split empty."""
        self.largest, self.seed = largest, seed
        numbers = range(largest + 1)
        held_out = sum(is_held_out(first, second) for first in numbers for second in numbers)
        if held_out in (0, len(numbers) ** 2):
            raise ValueError(f"data.arithmetic.largest = {largest} leaves a split empty: raise it")

    def problem(self, split: str, index: int) -> tuple[str, dict[str, Any]]:
        """(prompt, payload). Raises ValueError for a split that is neither "train" nor "held_out"."""
        if split not in SPLITS:
            raise ValueError(f"a split is train or held_out, not {split!r}")
        chance = random.Random(f"{self.seed}/{split}/{index}")
        while True:
            first, second = chance.randint(0, self.largest), chance.randint(0, self.largest)
            if is_held_out(first, second) == (split == "held_out"):
                return f"{first}+{second}=", {"answer": str(first + second)}

    def answer(self, payload: Any) -> str:
        """The digits of the sum."""
        return str(payload["answer"])

    def reward(self, payload: Any, text: str) -> float:
        """1.0 when `text` is the answer and nothing else, otherwise 0.0."""
        return 1.0 if text == payload["answer"] else 0.0


def is_held_out(first: int, second: int) -> bool:
    """Whether this sum belongs to the held-out split."""
    return hashlib.sha256(f"{first}+{second}".encode()).digest()[0] % HELD_OUT_OF == 0


def make_task(settings: Any, seed: int) -> ArithmeticTask:
    """The task of `settings`, a data section."""
    return ArithmeticTask(settings.arithmetic.largest, seed)
