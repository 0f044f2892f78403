"""A cohort at work: some slots of one simulator on their way through one fragment each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_actor.actors.fragment import CollectTask
from cosmos_actor.roles.cohort import Cohort, Row, without
from cosmos_actor.simulator_bridge.gateway import AttachedSimulator
from cosmos_actor.simulator_bridge.leases import Lease
from cosmos_actor.simulator_bridge.messages import Assignment, SlotFailure, Stepped

if TYPE_CHECKING:
    from cosmos_actor.roles.collector import Collector

RENEW_EVERY_S = 1.0
"""Between two renewals of what its simulator holds."""


@dataclass
class Seat:
    """One slot, and the episode that it is in."""

    slot: int
    lease: Lease | None = None
    queued: Lease | None = None
    observation: dict[str, np.ndarray] = field(default_factory=dict)
    total: float = 0.0
    length: int = 0

    def begin(self, lease: Lease | None) -> None:
        self.lease, self.total, self.length = lease, 0.0, 0

    def clear(self) -> None:
        """It is in no episode, and none is queued."""
        self.begin(None)
        self.queued, self.observation = None, {}


class Running:
    """One cohort from its first step to its last. A slot that fails leaves it; a simulator that fails ends it."""

    def __init__(self, collector: Collector, simulator: AttachedSimulator, seats: list[Seat],
                 tasks: list[CollectTask]) -> None:
        self._collector, self._simulator = collector, simulator
        self._seats, self._tasks = list(seats), list(tasks)
        """Of the slots that have not failed, in the order of the rows."""
        self._steps = tasks[0].steps
        self._cohort = Cohort()
        self._generator = np.random.default_rng([task.seed for task in tasks])
        self._episodes: dict[str, list[dict[str, Any]]] = {task.group_id: [] for task in tasks}
        self._actions = dict.fromkeys(self._episodes, 0)
        self._last: dict[str, np.ndarray] = {}
        self._renewed = collector.clock()
        self._through = False
        """Whether all steps were made."""

    async def run(self) -> None:
        """Raises SimulatorError when the whole simulator failed."""
        await self._begin()
        for _ in range(self._steps):
            if not self._seats:
                return
            await self._step()
        self._through = True

    def finished(self) -> dict[str, dict[str, Any]]:
        """Group id -> columns, of the tasks whose slot came through."""
        if not self._seats or not self._through:
            return {}
        found = self._cohort.columns(self._last)
        for at, seat in enumerate(self._seats):
            seat.observation = {name: column[at] for name, column in self._last.items()}
        return {task.group_id: {"columns": columns, "episodes": self._episodes[task.group_id],
                                "env_steps": self._actions[task.group_id],
                                "actor": self._simulator.name, "simulator": self._simulator.description.simulator}
                for task, columns in zip(self._tasks, found, strict=True)}

    def episodes_of_failed_slots(self) -> list[dict[str, Any]]:
        """Of tasks that this cohort does not finish; they count all the same."""
        kept = {task.group_id for task in self._tasks} if self._through else set()
        return [episode for name, episodes in self._episodes.items() if name not in kept for episode in episodes]

    async def _begin(self) -> None:
        """Slots that are in no episode begin one; the others go on where they were."""
        idle = [at for at, seat in enumerate(self._seats) if seat.lease is None]
        for at in idle:
            self._seats[at].begin(self._collector.lease(self._simulator))
        if idle:
            assignments = [Assignment(self._seats[at].slot, self._seats[at].lease.unit)  # type: ignore[union-attr]
                           for at in idle]
            answer = await self._simulator.reset(assignments, deadline_s=self._collector.limits.reset_s,
                                                 queue=self._queue(idle))
            seats = {seat.slot: seat for seat in self._seats}
            for at, slot in enumerate(answer.slots.tolist()):
                seats[slot].observation = {name: column[at] for name, column in answer.observations.items()}
            self._drop(answer.failures)
        if self._seats:
            names = self._simulator.description.observations
            self._last = self._told({name: np.stack([seat.observation[name] for seat in self._seats])
                                     for name in names}, self._seats)

    def _told(self, observations: Mapping[str, np.ndarray], seats: Sequence[Seat]) -> dict[str, np.ndarray]:
        """With what the policy is told besides, one row for each of `seats`."""
        tasks = [seat.lease.unit.task for seat in seats if seat.lease is not None]
        return {**observations, **self._collector.told(tasks)}

    async def _step(self) -> None:
        acted = await self._collector.act(self._last, self._generator)
        deadline_s = self._collector.limits.chunk_s(acted.commands) + self._resets_s()
        answer = await self._simulator.step([seat.slot for seat in self._seats], acted.commands, deadline_s=deadline_s,
                                            queue=self._queue(range(len(self._seats))))
        if len(answer.slots) < len(self._seats):
            kept = self._drop(answer.failures, but=answer.slots.tolist())
            acted = acted.rows(kept)
        ended = set(answer.ended.tolist())
        finals = self._told(answer.final_observations, [seat for seat in self._seats if seat.slot in ended])
        row = Row.of(self._last, acted, answer, finals)
        self._cohort.add(row)
        self._count(answer, row.rewards.tolist())
        self._last = self._told(answer.observations, self._seats)
        if answer.failures:
            self._drop(answer.failures)  # an episode ended well, and the next one could not begin

    def _resets_s(self) -> float:
        """An episode may end with this step, and the queued one begin."""
        return self._collector.limits.reset_s

    def _count(self, answer: Stepped, rewards: list[float]) -> None:
        steps = answer.steps.tolist()
        for at, seat in enumerate(self._seats):
            seat.total += rewards[at]
            seat.length += steps[at]
            self._actions[self._tasks[at].group_id] += steps[at]
        for slot in answer.ended.tolist():
            at = next(at for at, seat in enumerate(self._seats) if seat.slot == slot)
            self._episode(at, answer)
        if self._collector.clock() - self._renewed > RENEW_EVERY_S:
            self._renewed = self._collector.clock()
            self._collector.renew(self._simulator)

    def _episode(self, at: int, answer: Stepped) -> None:
        """That slot's episode has ended, and the queued one has begun."""
        seat, task = self._seats[at], self._tasks[at]
        lease = seat.lease
        assert lease is not None
        if self._collector.ended(lease):
            unit = lease.unit
            self._episodes[task.group_id].append({
                "unit": unit.unit_id, "task": unit.task, "seed": unit.seed, "initial_state": unit.initial_state,
                "attempt": unit.attempt, "return": seat.total, "length": seat.length,
                "terminated": bool(answer.terminated[at]), "success": int(answer.success[at]),
                "simulator": self._simulator.description.simulator, "actor": self._simulator.name})
        seat.begin(seat.queued)
        seat.queued = None

    def _queue(self, rows: Any) -> list[Assignment]:
        """A next unit for each of these rows that has none."""
        queue = []
        for at in rows:
            seat = self._seats[at]
            if seat.queued is None:
                seat.queued = self._collector.lease(self._simulator)
                queue.append(Assignment(seat.slot, seat.queued.unit))
        return queue

    def _drop(self, failures: Sequence[SlotFailure], but: Sequence[int] = ()) -> np.ndarray:
        """These slots, `but` some, leave the cohort with all that they had; [n] bool of those that stay."""
        failed = {failure.slot: failure for failure in failures if failure.slot not in but}
        kept = without([seat.slot for seat in self._seats], list(failed))
        for seat in self._seats:
            if seat.slot in failed:
                self._collector.fail(self._simulator, seat, failed[seat.slot].kind, failed[seat.slot].text)
        self._seats = [seat for seat, stays in zip(self._seats, kept, strict=True) if stays]
        self._tasks = [task for task, stays in zip(self._tasks, kept, strict=True) if stays]
        self._last = {name: column[kept] for name, column in self._last.items()}
        self._cohort.keep(kept)
        return kept
