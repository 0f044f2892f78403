"""Where the arrays of a step lie in memory that two processes share. Pure.

A step's shapes follow from its simulator's description, n and K: both sides count the same places and send none.
Legend: n slots of a request, K actions of a chunk, m slots whose episode ended.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np

from .contract import Description

ALIGNMENT_BYTES = 64
MOST_BYTES = 64 << 20
"""Of one direction. Where observations are larger than this, copying them costs more than all that is saved here."""
ROOM_FOR_ACTIONS = 64
"""Actions a slot that there is room for; longer chunks go by the bus."""
KEPT = 64
"""Pairs of n and K whose arrays are kept: a driver has a few, and somebody else's numbers must not fill our memory."""

Shapes = List[Tuple[Any, Tuple[int, ...]]]
"""dtype and shape of each array, in order."""


class RequestArrays(NamedTuple):
    slots: np.ndarray
    """[n] int32"""
    actions: np.ndarray
    """[n, K, …]"""


class AnswerArrays(NamedTuple):
    rewards: np.ndarray
    """[n, K] float32"""
    rows: np.ndarray
    """[n, 5] int32"""
    seen: List[Tuple[str, np.ndarray]]
    """Name and [n, …] of each observation."""
    final: List[Tuple[str, np.ndarray]]
    """The same for the last of the episodes that ended; the first m rows hold them."""


class _Arrays:
    """Arrays of one kind in one memory, which all begin at its first byte."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._kept: Dict[Tuple[int, int], Any] = {}
        self._memory: Any = None

    def _shapes(self, n: int, K: int) -> Shapes:
        raise NotImplementedError

    def _named(self, arrays: List[np.ndarray]) -> Any:
        raise NotImplementedError

    def capacity_bytes(self, envs: int) -> int:
        """What a session of so many slots needs."""
        return placed(self._shapes(envs, ROOM_FOR_ACTIONS))[1]

    def lie_in(self, memory: Any, first_byte: int, capacity_bytes: int) -> None:
        self._memory, self._first, self._capacity = memory, first_byte, capacity_bytes

    def of(self, n: int, K: int) -> Any:
        """Those of a step of this size; None: there is no room for them."""
        kept = self._kept.get((n, K))
        return self._made(n, K) if kept is None else kept

    def _made(self, n: int, K: int) -> Any:
        shapes = self._shapes(n, K)
        offsets, end = placed(shapes)
        if end > self._capacity:
            return None
        if len(self._kept) >= KEPT:
            self._kept.clear()
        made = self._kept[n, K] = self._named([
            np.ndarray(shape, dtype, self._memory, self._first + offset)
            for (dtype, shape), offset in zip(shapes, offsets)])
        return made

    def close(self) -> None:
        """Let go of the memory."""
        self._kept.clear()
        self._memory = None


class Requests(_Arrays):
    """`of` gives RequestArrays."""

    def _shapes(self, n: int, K: int) -> Shapes:
        action = self._description.action
        return [(np.int32, (n,)), (action.dtype, (n, K, *action.shape))]

    def _named(self, arrays: List[np.ndarray]) -> RequestArrays:
        return RequestArrays(*arrays)


class Answers(_Arrays):
    """`of` gives AnswerArrays."""

    def _shapes(self, n: int, K: int) -> Shapes:
        seen: Shapes = [(spec.dtype, (n, *spec.shape)) for spec in self._description.observations.values()]
        return [(np.float32, (n, K)), (np.int32, (n, 5)), *seen, *seen]

    def _named(self, arrays: List[np.ndarray]) -> AnswerArrays:
        rewards, rows, *seen = arrays
        names = list(self._description.observations)
        return AnswerArrays(rewards, rows, list(zip(names, seen)), list(zip(names, seen[len(names):])))


def placed(shapes: Shapes) -> Tuple[List[int], int]:
    """(offset of each array, bytes of all)"""
    offsets, end = [], 0
    for dtype, shape in shapes:
        offsets.append(end)
        nbytes = np.dtype(dtype).itemsize
        for size in shape:
            nbytes *= size
        end += nbytes + -nbytes % ALIGNMENT_BYTES
    return offsets, end
