"""Drives the simulators that are attached: fragments for training, whole episodes for an evaluation.

    tasks ──> cohorts (one a simulator: its slots step together) ──> fragments
      ^                                     |
      '── a slot or a simulator fails: what it had is thrown away and asked of another ──'

Requests may overlap: who is idle while the last cohorts of one go on begins with the next.

Invariant: a fragment is of steps that simulators really made, one after the other; an error of a simulator is counted,
told and never a reward. An episode is reported once, when its end is in a fragment that is handed over.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cosmos_actor.actors.fragment import CollectTask
from cosmos_actor.roles.acting import BatchedActing
from cosmos_actor.roles.running import Running, Seat
from cosmos_actor.simulator_bridge.contract import SimulatorError, WorkUnit
from cosmos_actor.simulator_bridge.gateway import AttachedSimulator, Gateway
from cosmos_actor.simulator_bridge.leases import Lease, LeaseTable

LOOK_S = 1.0
"""Between two looks at what nobody renews."""
Noise = Callable[[np.random.Generator, int], np.ndarray]
"""(generator, n) -> noise [n, …] for n actions"""
Source = Callable[[int], WorkUnit]
"""Number -> the unit of that number."""
Told = Callable[[Sequence[str]], Mapping[str, np.ndarray]]
"""The tasks of n slots -> name -> [n, …] that the policy gets besides what they see."""


class SimulatorsFail(Exception):
    """So many attempts failed that a person has to look."""


@dataclass(frozen=True)
class CollectLimits:
    """Deadlines in seconds; see `recipes.sections.SimulatorSection`."""

    step_s: float
    reset_s: float
    most_given_up: int

    def chunk_s(self, commands: np.ndarray) -> float:
        """For commands [n, K, …]."""
        return self.step_s * commands.shape[1]


@dataclass(eq=False)
class _Request:
    """One call of `collect`."""

    pending: deque[CollectTask]
    first_unit: int
    running: set[asyncio.Task[None]] = field(default_factory=set)
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    given_up: int = 0
    """Units whose last attempt failed while a simulator worked for it."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Each waits for one of its own: what another has heard of is not forgotten for this one."""


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
        self.told = told
        self._prefix, self._units, self._number = prefix, 0, 0
        self._requests: list[_Request] = []
        """In the order in which they came."""
        self._busy: dict[AttachedSimulator, _Request] = {}
        """For whom each works that is not idle."""
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
        self._renew_idle()
        request = _Request(deque(tasks), min((task.first_unit for task in tasks), default=0))
        self._requests.append(request)
        try:
            while len(request.done) < len(tasks):
                self._hand_out(request)
                await self._change(request)
                if request.given_up > self.limits.most_given_up:
                    raise SimulatorsFail(f"{request.given_up} work units were given up, after {self._failures()}: see "
                                         "the simulators' logs, or raise sim.most_given_up")
        except BaseException:  # whatever ended it
            await self._throw_away(request)
            raise
        finally:
            self._requests.remove(request)
            self._wake()
        return [request.done[task.group_id] for task in tasks]

    def interrupt(self) -> None:
        """Somebody else uses the slots next: the episodes they are in are begun anew afterwards."""
        for seats in self._seats.values():
            for seat in seats:
                self._let_go(seat)

    def statistics(self) -> dict[str, Any]:
        return {"leases": self._leases.statistics(), "gateway": self._gateway.statistics(),
                "acting": self._acting.statistics()}

    # ---- who gets what

    def _hand_out(self, request: _Request) -> None:
        """Idle simulators begin with what is pending, unless an earlier request still has something for them."""
        if any(earlier.pending for earlier in self._requests[:self._requests.index(request)]):
            return
        shares = self._shares(len(request.pending))
        if shares:
            self._number = max(self._number, request.first_unit)
        for simulator, share in shares:
            part = [request.pending.popleft() for _ in range(share)]
            task = asyncio.ensure_future(self._fragments(simulator, part, request))
            request.running.add(task)
            self._busy[simulator] = request
            task.add_done_callback(functools.partial(self._idle_again, simulator))
        self._acting.asking = len(self._busy)
        if shares and not request.pending:
            self._wake()  # a later request may be waiting for that

    def _idle_again(self, simulator: AttachedSimulator, _: asyncio.Task[None]) -> None:
        del self._busy[simulator]
        self._acting.asking = len(self._busy)
        self._wake()

    def _wake(self) -> None:
        for request in self._requests:
            request.changed.set()

    def _shares(self, pending: int) -> list[tuple[AttachedSimulator, int]]:
        """How many of the pending tasks each idle simulator takes: evenly, at most one a slot."""
        idle = [simulator for simulator in self._seats if simulator not in self._busy]
        shares = []
        for at, simulator in enumerate(idle):
            share = min(len(simulator.slots), -(-pending // (len(idle) - at)))
            if share:
                shares.append((simulator, share))
                pending -= share
        return shares

    async def _change(self, request: _Request) -> None:
        """Wait until somebody is idle again, came or went, or it is time for a look. Raises what a cohort raised."""
        request.changed.clear()
        if not any(task.done() for task in request.running):
            change = asyncio.ensure_future(request.changed.wait())
            try:
                await asyncio.wait([change], timeout=LOOK_S)  # `wait_for` may take a cancellation for the change
            finally:
                change.cancel()
        self._end_overdue()
        ended = {task for task in request.running if task.done()}
        request.running -= ended
        for task in ended:
            task.result()

    async def _throw_away(self, request: _Request) -> None:
        """End what runs for it, before anybody else has those simulators. Episodes that ended count all the same."""
        for task in request.running:
            task.cancel()
        try:
            if request.running:
                await asyncio.wait(request.running)
        finally:
            self._unreported += [episode for found in request.done.values() for episode in found["episodes"]]

    def _end_overdue(self) -> None:
        """Whoever has work, and a lease that was not renewed in time, has not got on."""
        self._renew_idle()
        for holder in {lease.holder for lease in self._leases.expired(self.clock())}:
            for simulator in [one for one in self._seats if one.name == holder]:
                self._gateway.dismiss(simulator, "it has not got on with a work unit within sim.lease_s")

    def _renew_idle(self) -> None:
        """Who has nothing to do holds units all the same: of episodes that it is in the middle of."""
        for simulator in self._seats:
            if simulator not in self._busy:
                self.renew(simulator)

    def _failures(self) -> str:
        counts = self._leases.statistics()["failures"]
        return ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))

    def _attached(self, simulator: AttachedSimulator) -> None:
        self._seats[simulator] = [Seat(slot) for slot in simulator.slots]
        self._wake()

    def _gone(self, simulator: AttachedSimulator) -> None:
        for seat in self._seats.pop(simulator, []):
            if simulator.left and seat.lease is not None:
                self._leases.give_back(seat.lease)
            self.fail(simulator, seat, "lost", f"{simulator} is gone: {simulator.gone}")
        self._wake()

    # ---- one cohort

    async def _fragments(self, simulator: AttachedSimulator, tasks: list[CollectTask], request: _Request) -> None:
        """Run the tasks on the simulator's first slots; those that could not be done are pending again."""
        seats = self._seats.get(simulator, [])[:len(tasks)]  # none: it went before it could begin
        cohort = Running(self, simulator, seats, tasks)
        try:
            await cohort.run()
        except SimulatorError as error:
            for seat in seats:
                self.fail(simulator, seat, error.kind, error.text)
            if error.kind in ("hang", "lost"):
                self._gateway.dismiss(simulator, error.text)
        except BaseException:  # cancelled, or there is no answer to what is seen: how far its slots got, nobody knows
            for seat in seats:
                self._let_go(seat)
            raise
        finally:
            self._unreported += cohort.episodes_of_failed_slots()
        finished = cohort.finished()
        for fragment in finished.values():
            fragment["episodes"] += self._unreported
            self._unreported = []
        request.done.update(finished)
        request.pending.extend(task for task in tasks if task.group_id not in finished)

    def lease(self, simulator: AttachedSimulator) -> Lease:
        """A unit that failed elsewhere, or the next new one. Numbers only grow: no unit is begun under two names."""
        if not self._leases.waiting:
            self._units += 1
            self._leases.add(replace(self._source(self._number), unit_id=f"{self._prefix}.{self._units}"))
            self._number += 1
        lease = self._leases.take(simulator.name, self.clock())
        assert lease is not None
        return lease

    def renew(self, simulator: AttachedSimulator) -> None:
        """It gets on, or has nothing to do."""
        for seat in self._seats.get(simulator, []):
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
        seat.clear()

    def fail(self, simulator: AttachedSimulator, seat: Seat, kind: str, text: str) -> None:
        """The seat's episode came to nothing; what is queued there has not begun."""
        lease, queued = seat.lease, seat.queued
        seat.clear()
        if queued is not None:
            self._leases.give_back(queued)
        if lease is not None and self._leases.holds(lease):
            verdict = self._leases.failed(lease, kind)
            if not verdict.again and simulator in self._busy:
                self._busy[simulator].given_up += 1
            self._tell({"kind": kind, "text": text, "simulator": str(simulator), "unit": lease.unit.unit_id,
                        "attempt": lease.unit.attempt, "again": verdict.again})

    async def act(self, observations: Mapping[str, np.ndarray], generator: np.random.Generator) -> Any:
        rows = len(next(iter(observations.values())))
        return await self._acting.act(observations, self._noise(generator, rows))
