"""What becomes of the slots of one request while their actions are made. Pure.

Legend: n slots of the request, K actions of its chunk. Rows are positions in the request.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Optional, Tuple, Union

import numpy as np

from .contract import UNKNOWN, Outcome, SimulatorError
from .messages import SLOT, STEPS, SUCCEEDED, TERMINATED, TRUNCATED

EVERY = slice(None)
"""Instead of the numbers of all rows: a view of an array costs a tenth of a selection from it."""

NEW_ROW = np.zeros(5, np.int32)
NEW_ROW[SUCCEEDED] = UNKNOWN

Failures = Dict[int, SimulatorError]
"""Slot -> what became of its unit."""


class Chunk:
    """A row runs until its episode ends or it fails; what was noted of it stays."""

    def __init__(self, slots: List[int], K: int, every: bool = False) -> None:
        """`every`: these are all slots of the session, in their order."""
        n = len(slots)
        self.slots, self.K = slots, K
        self.running: Optional[np.ndarray] = None
        """Rows whose episode goes on; None: all."""
        self.some_ended = self._told = False
        self.rewards = np.zeros((n, K), np.float32)
        self.rows = new_rows(slots)
        """See `Stepped.rows`."""
        self.intermediate: Dict[str, np.ndarray] = {}
        self.failures: Failures = {}
        self._where = EVERY if every else in_a_row(slots)

    @property
    def goes_on(self) -> bool:
        """Whether any does."""
        return len(self.slots if self.running is None else self.running) > 0

    def going_on(self) -> np.ndarray:
        return np.arange(len(self.slots)) if self.running is None else self.running

    def acting(self) -> Tuple[Any, List[int], Any]:
        """(rows that make the next action, their slots, what selects these of all slots)"""
        if self.running is None:
            return EVERY, self.slots, self._where
        slots = [self.slots[row] for row in self.running.tolist()]
        return self.running, slots, slots

    @property
    def row_of(self) -> Dict[int, int]:
        return {slot: row for row, slot in enumerate(self.slots)}

    def note(self, rows: Any, k: int, outcome: Outcome, spent: Optional[np.ndarray]) -> None:
        """What action k of these rows, all that run, did; `spent`: whose budget of steps it was the last of."""
        rewards, terminated, truncated, success = outcome
        self.rewards[rows, k] = rewards
        self.rows[rows, STEPS] = k + 1  # it has run until now
        if success is not None or self._told:
            self._told = True
            self.rows[rows, SUCCEEDED] = UNKNOWN if success is None else success
        if spent is not None:
            truncated = truncated | (spent & ~terminated)
        if True in terminated.tolist() or True in truncated.tolist():
            self.some_ended = True
            self.rows[rows, TERMINATED] = terminated
            self.rows[rows, TRUNCATED] = truncated
            if k + 1 < self.K:
                self.running = self.going_on()[~(terminated | truncated)]

    def fail(self, failures: Failures) -> None:
        self.failures.update(failures)
        self.running = np.array([row for row in self.going_on() if self.slots[row] not in failures], np.int64)

    def not_failed(self) -> List[int]:
        if not self.failures:
            return self.slots
        return [slot for slot in self.slots if slot not in self.failures]

    def of(self, slots: List[int]) -> Tuple[np.ndarray, np.ndarray, Dict[str, np.ndarray]]:
        """(rewards, rows, intermediate) of these slots, in the order of the request."""
        if len(slots) == len(self.slots):
            return self.rewards, self.rows, self.intermediate
        row_of = self.row_of
        kept = [row_of[slot] for slot in slots]
        return self.rewards[kept], self.rows[kept], {name: array[kept] for name, array in self.intermediate.items()}


@functools.lru_cache(maxsize=8)
def _template(slots: Tuple[int, ...]) -> np.ndarray:
    rows = np.empty((len(slots), len(NEW_ROW)), np.int32)
    rows[:] = NEW_ROW
    rows[:, SLOT] = slots
    return rows


def new_rows(slots: List[int]) -> np.ndarray:
    """[n, 5] of slots of which nothing is known yet."""
    return _template(tuple(slots)).copy()


def in_a_row(slots: List[int]) -> Union[slice, List[int]]:
    """What selects these slots of all: a slice where they are neighbours, which costs a tenth."""
    if slots and slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return slots
