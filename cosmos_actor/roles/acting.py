"""Choosing actions for many simulators at once: what is asked within a moment of each other is one forward pass.

Legend: n rows of one question, R rows of a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Observations = Mapping[str, np.ndarray]
"""Name -> [n, …]"""


@dataclass(frozen=True)
class Acted:
    """The answer to n observations."""

    actions: np.ndarray
    """[n, …]"""
    logprobs: np.ndarray
    """[n] float32"""
    values: np.ndarray
    """[n] float32"""
    version: int
    """The weights that chose."""
    commands: np.ndarray
    """[n, K, …]: what the simulator is told, K actions one after the other, within its bounds."""

    def rows(self, which: Any) -> Acted:
        """The answer to these rows: a slice, a mask or indices."""
        return Acted(self.actions[which], self.logprobs[which], self.values[which], self.version, self.commands[which])


Act = Callable[[Observations, np.ndarray], Awaitable[Acted]]
"""(observations, noise [R, …]) -> their actions"""


@dataclass
class _Question:
    observations: Observations
    noise: np.ndarray
    answer: asyncio.Future[Acted]


class BatchedActing:
    """`act` answers every question exactly once, in the order of its rows; a failure reaches all of its batch.

    A batch leaves when as many ask as are `asking`, when `least_rows` of them wait (0: that is no reason), or when the
    first has waited for `max_wait_s`. With `least_rows` = M that is the first M of N environments: the asynchronous
    batches of EnvPool (Weng et al. 2022), here in whole questions, one of each simulator's process.
    """

    def __init__(self, act: Act, max_wait_s: float, least_rows: int = 0) -> None:
        self._act, self._max_wait_s, self._least_rows = act, max_wait_s, least_rows
        self.asking = 0
        """How many take turns in asking now."""
        self._waiting: list[_Question] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._counts = {"batches": 0, "questions": 0, "rows": 0}

    async def act(self, observations: Observations, noise: np.ndarray) -> Acted:
        """For n observations, with noise [n, …]."""
        if self.asking <= 1 and not self._waiting:  # nobody to wait for, and a task costs two turns of the loop
            self._count([len(noise)])
            return await self._act(observations, noise)
        loop = asyncio.get_running_loop()
        question = _Question(observations, noise, loop.create_future())
        self._waiting.append(question)
        if len(self._waiting) >= self.asking or self._enough():
            self._leave()
        elif self._timer is None:
            self._timer = loop.call_later(self._max_wait_s, self._leave)
        return await question.answer

    def statistics(self) -> dict[str, int]:
        return dict(self._counts)

    def _enough(self) -> bool:
        return 0 < self._least_rows <= sum(len(question.noise) for question in self._waiting)

    def _count(self, rows: list[int]) -> None:
        self._counts["batches"] += 1
        self._counts["questions"] += len(rows)
        self._counts["rows"] += sum(rows)

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        if batch:
            task = asyncio.get_running_loop().create_task(self._answer(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _answer(self, batch: list[_Question]) -> None:
        rows = [len(question.noise) for question in batch]
        self._count(rows)
        try:
            acted = await self._act(_joined([question.observations for question in batch]),
                                    np.concatenate([question.noise for question in batch]))
        except Exception as error:  # whoever asks is to hear of it, whatever it is
            for question in batch:
                if not question.answer.done():
                    question.answer.set_exception(error)
            return
        at = 0
        for question, count in zip(batch, rows, strict=True):
            part = slice(at, at + count)
            at += count
            if not question.answer.done():
                question.answer.set_result(acted.rows(part))


def _joined(parts: list[Observations]) -> Observations:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
