"""What a language-conditioned policy is told, as one more array of its observation.

A word is its number by a hash, so that there is no vocabulary to ship: words that the policy never met have numbers
too.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from cosmos_actor.simulator_bridge.contract import ArraySpec, Description

INSTRUCTION = "instruction"
"""Name of the array [n, WORDS] int32; 0 fills up."""
WORDS = 24
"""LIBERO's longest instruction has 17."""
VOCABULARY = 4096
"""Numbers that words can have, 0 left out. Two of twenty words meet in one of 22 vocabularies."""


def observations_of(description: Description, *, kind: str) -> dict[str, ArraySpec]:
    """What a network of this kind gets: what the simulator shows, and for a vla what it is told to do."""
    told = {INSTRUCTION: ArraySpec("int32", (WORDS,))} if kind == "vla" else {}
    return {**description.observations, **told}


def words_of(text: str) -> np.ndarray:
    """[WORDS] int32, each in 1..VOCABULARY-1, then zeros. Words beyond WORDS are left out."""
    numbers = [zlib.crc32(word.encode()) % (VOCABULARY - 1) + 1 for word in re.findall(r"[\w']+", text.lower())]
    row = np.zeros(WORDS, np.int32)
    row[:len(numbers[:WORDS])] = numbers[:WORDS]
    return row


class Instructions:
    """Task -> what its slots are told besides what they see. A task without an instruction is told its name."""

    def __init__(self, description: Description, *, kind: str) -> None:
        tasks = description.tasks if kind == "vla" else []
        self._rows = {task.name: words_of(task.instruction or task.name) for task in tasks}

    def told(self, tasks: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Name -> [n, …] for n slots that do these tasks; nothing for a network that does not read."""
        return {INSTRUCTION: np.stack([self._rows[task] for task in tasks])} if self._rows and tasks else {}
