"""Drives the simulators that are attached: fragments for training, whole episodes for an evaluation.

    tasks ──> cohorts (one a simulator: its slots step together) ──> fragments
      ^                                     |
      '── a slot or a simulator fails: what it had is thrown away and asked of another ──'

Invariant: a fragment is of steps that simulators really made, one after the other; an error of a simulator is counted,
told and never a reward. An episode is reported once, when its end is in a fragment that is handed over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cosmos_actor.actors.fragment import CollectTask
from cosmos_actor.roles.acting import BatchedActing
from cosmos_actor.roles.cohort import Cohort, Row, without
from cosmos_actor.simulator_bridge.contract import SimulatorError, WorkUnit
from cosmos_actor.simulator_bridge.gateway import AttachedSimulator, Gateway
from cosmos_actor.simulator_bridge.leases import Lease, LeaseTable
from cosmos_actor.simulator_bridge.messages import Assignment, SlotFailure, Stepped

RENEW_EVERY_S, LOOK_S = 1.0, 1.0
"""Between two renewals of what a cohort holds, and two looks at what nobody renews."""
Noise = Callable[[np.random.Generator, int], np.ndarray]
"""(generator, n) -> noise [n, …] for n actions"""
Source = Callable[[int], WorkUnit]
"""Number -> the unit of that number."""
Told = Callable[[Sequence[str]], Mapping[str, np.ndarray]]
"""The tasks of n slots -> name -> [n, …] that the policy gets besides what they see."""


class SimulatorsFail(Exception):
    """So many attempts failed that a person has to look."""


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


@dataclass(frozen=True)
class CollectLimits:
    """Deadlines in seconds; see `recipes.sections.SimulatorSection`."""

    step_s: float
    reset_s: float
    most_given_up: int

    def chunk_s(self, commands: np.ndarray) -> float:
        """For commands [n, K, …]."""
        return self.step_s * commands.shape[1]


class Collector:
    """See the module. Lives on the loop of the actor's bus."""

    def __init__(self, gateway: Gateway, acting: BatchedActing, leases: LeaseTable, source: Source, noise: Noise,
                 limits: CollectLimits, clock: Callable[[], float], tell: Callable[[dict[str, Any]], None],
                 prefix: str, told: Told) -> None:
        """`tell` hears of each failure: {"kind", "text", "simulator", "unit", "attempt", "again"}. `prefix` begins the
        names of units, and no other collector of the run has it."""
        self._gateway, self._acting, self._leases, self._source = gateway, acting, leases, source
        self._noise, self.limits, self.clock, self._tell = noise, limits, clock, tell
        self._seats: dict[AttachedSimulator, list[Seat]] = {}
        self._changed = asyncio.Event()
        self.told = told
        self._prefix, self._units, self._number = prefix, 0, 0
        self._given_up = 0
        self._unreported: list[dict[str, Any]] = []
        """Episodes that ended in fragments which were thrown away later."""
        gateway.on_attached(self._attached)
        gateway.on_gone(self._gone)
        for simulator in gateway.present:
            self._attached(simulator)

    async def collect(self, tasks: Sequence[CollectTask]) -> list[dict[str, Any]]:
        """The columns of a Fragment for each task, in order, and `task` beside them: see `Cohort.columns`.

        Waits for simulators as long as it takes. Raises SimulatorsFail when too many units had to be given up.
        """
        self._given_up = 0
        self._number = max(self._number, min((task.first_unit for task in tasks), default=0))
        for seats in self._seats.values():
            self.renew(seats)
        pending, done = deque(tasks), {}
        running: dict[asyncio.Task[list[CollectTask]], AttachedSimulator] = {}
        try:
            while len(done) < len(tasks):
                for simulator, share in self._shares(len(pending), busy=list(running.values())):
                    part = [pending.popleft() for _ in range(share)]
                    running[asyncio.ensure_future(self._fragments(simulator, part, done))] = simulator
                self._acting.asking = len(running)
                for undone in await self._next_end(running):
                    pending.extend(undone)
                if self._given_up > self.limits.most_given_up:
                    raise SimulatorsFail(f"{self._given_up} work units were given up, after {self._failures()}: "
                                         "see the simulators' logs, or raise sim.most_given_up")
        except BaseException:  # whatever ended it: what was made is thrown away, and its episodes count all the same
            self._unreported += [episode for found in done.values() for episode in found["episodes"]]
            raise
        finally:
            for task in running:
                task.cancel()
            self._acting.asking = 0
        return [done[task.group_id] for task in tasks]

    def interrupt(self) -> None:
        """Somebody else uses the slots next: the episodes they are in are begun anew afterwards."""
        for seats in self._seats.values():
            for seat in seats:
                self._let_go(seat)

    def statistics(self) -> dict[str, Any]:
        return {"leases": self._leases.statistics(), "gateway": self._gateway.statistics(),
                "acting": self._acting.statistics()}

    # ---- who gets what

    def _shares(self, pending: int, busy: Sequence[AttachedSimulator]) -> list[tuple[AttachedSimulator, int]]:
        """How many of the pending tasks each idle simulator takes: evenly, at most one a slot."""
        idle = [simulator for simulator in self._seats if simulator not in busy]
        shares = []
        for at, simulator in enumerate(idle):
            share = min(len(simulator.slots), -(-pending // (len(idle) - at)))
            if share:
                shares.append((simulator, share))
                pending -= share
        return shares

    async def _next_end(self, running: dict[asyncio.Task[list[CollectTask]], AttachedSimulator]
                        ) -> list[list[CollectTask]]:
        """What each cohort left undone that ends now; none when only somebody came or went, or nothing happened."""
        self._changed.clear()
        change = asyncio.ensure_future(self._changed.wait())
        try:
            ended, _ = await asyncio.wait([*running, change], timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
        self._end_overdue()
        left = [task.result() for task in ended if task in running]
        for task in ended:
            running.pop(task, None)
        return left

    def _end_overdue(self) -> None:
        """Whoever holds a lease that was not renewed in time has not got on."""
        for holder in {lease.holder for lease in self._leases.expired(self.clock())}:
            for simulator in [one for one in self._seats if one.name == holder]:
                self._gateway.dismiss(simulator, "it has not got on with a work unit within sim.lease_s")

    def _failures(self) -> str:
        counts = self._leases.statistics()["failures"]
        return ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))

    def _attached(self, simulator: AttachedSimulator) -> None:
        self._seats[simulator] = [Seat(slot) for slot in simulator.slots]
        self._changed.set()

    def _gone(self, simulator: AttachedSimulator) -> None:
        for seat in self._seats.pop(simulator, []):
            if simulator.left and seat.lease is not None:
                self._leases.give_back(seat.lease)
            self.fail(simulator, seat, "lost", f"{simulator} is gone: {simulator.gone}")
        self._changed.set()

    # ---- one cohort

    async def _fragments(self, simulator: AttachedSimulator, tasks: list[CollectTask],
                         done: dict[str, dict[str, Any]]) -> list[CollectTask]:
        """Run the tasks on the simulator's first slots; those that could not be done."""
        seats = self._seats.get(simulator, [])[:len(tasks)]
        if not seats:
            return tasks  # it went before it could begin
        cohort = _Running(self, simulator, seats, tasks)
        try:
            await cohort.run()
        except SimulatorError as error:
            for seat in seats:
                self.fail(simulator, seat, error.kind, error.text)
            if error.kind in ("hang", "lost"):
                self._gateway.dismiss(simulator, error.text)
            return tasks
        except asyncio.CancelledError:
            for seat in seats:
                self._let_go(seat)
            raise
        finally:
            self._unreported += cohort.episodes_of_failed_slots()
        finished = cohort.finished()
        for fragment in finished.values():
            fragment["episodes"] += self._unreported
            self._unreported = []
        done.update(finished)
        return [task for task in tasks if task.group_id not in finished]

    def lease(self, simulator: AttachedSimulator) -> Lease:
        """A unit that failed elsewhere, or the next new one. Numbers only grow: no unit is begun under two names."""
        if not self._leases.waiting:
            self._units += 1
            self._leases.add(replace(self._source(self._number), unit_id=f"{self._prefix}.{self._units}"))
            self._number += 1
        lease = self._leases.take(simulator.name, self.clock())
        assert lease is not None
        return lease

    def renew(self, seats: Sequence[Seat]) -> None:
        for seat in seats:
            for lease in (seat.lease, seat.queued):
                if lease is not None:
                    self._leases.renew(lease, self.clock())

    def ended(self, lease: Lease) -> bool:
        """Whether its episode counts."""
        return self._leases.done(lease)

    def _let_go(self, seat: Seat) -> None:
        """In the middle of a request: how far the slot got, nobody knows, so its unit is begun anew."""
        for lease in (seat.lease, seat.queued):
            if lease is not None:
                self._leases.give_back(lease)
        seat.begin(None)
        seat.queued, seat.observation = None, {}

    def fail(self, simulator: AttachedSimulator, seat: Seat, kind: str, text: str) -> None:
        """The seat's episode came to nothing; what is queued there has not begun."""
        lease, queued = seat.lease, seat.queued
        seat.begin(None)
        seat.queued, seat.observation = None, {}
        if queued is not None:
            self._leases.give_back(queued)
        if lease is not None and self._leases.holds(lease):
            verdict = self._leases.failed(lease, kind)
            self._given_up += not verdict.again
            self._tell({"kind": kind, "text": text, "simulator": str(simulator), "unit": lease.unit.unit_id,
                        "attempt": lease.unit.attempt, "again": verdict.again})

    async def act(self, observations: Mapping[str, np.ndarray], generator: np.random.Generator) -> Any:
        rows = len(next(iter(observations.values())))
        return await self._acting.act(observations, self._noise(generator, rows))


class _Running:
    """Some slots of one simulator on their way through one fragment each."""

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
        if not self._seats:
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
            self._collector.renew(self._seats)

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
