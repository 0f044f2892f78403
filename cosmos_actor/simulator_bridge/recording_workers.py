"""Several processes record at once, each with a simulator of its own."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from .contract import WorkUnit
from .mistakes import Mistake

Wanted = Tuple[WorkUnit, int]
"""A unit, and the index of its task in the dataset."""
Came = Tuple[Optional[Any], str]
"""An episode and "", or None and what went wrong."""
_mine: List[Any] = []
"""The expert of this process."""


class Workers:
    """Guarantee: episodes come in the order they were asked for, whoever made them."""

    def __init__(self, name: str, noise: float, count: int) -> None:
        """`name`: KIND:ID of the simulator, which each process loads."""
        self._pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin,
                                         initargs=(name, noise))

    def episodes(self, wanted: Sequence[Wanted]) -> Iterator[Came]:
        """Raises Mistake when a process ends by itself, or its expert is none."""
        try:
            yield from self._pool.map(_episode, wanted)
        except BrokenProcessPool as error:
            raise Mistake("--workers: a process of the simulator ended by itself, see above; with --workers 1 it ends "
                          "in the terminal") from error

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def _begin(name: str, noise: float) -> None:
    from .plugins import SimulatorName, load
    from .recording import Expert

    simulator = load(SimulatorName.parse(name))
    _mine.append(Expert(simulator.open(1), simulator.describe(), noise))


def _episode(wanted: Wanted) -> Came:
    expert = _mine[0]
    episode = expert.episode(*wanted)
    return episode, "" if episode is not None else expert.error
