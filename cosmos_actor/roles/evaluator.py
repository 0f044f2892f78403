"""Closed-loop evaluation: every work unit is run from its beginning to its end, once, by the likeliest actions.

    waiting ──a free slot──> running ──its episode ends──> a record
       ^                        |──an error of a simulator──> waiting again, or a record that says so
       '──its simulator leaves──'

Invariant: one record a unit. An error of a simulator is no failure of the policy: its record has no success.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_actor.roles.acting import Acted
from cosmos_actor.roles.collector import CollectLimits, Told
from cosmos_actor.roles.films import Films
from cosmos_actor.simulator_bridge.contract import UNKNOWN, SimulatorError, WorkUnit
from cosmos_actor.simulator_bridge.gateway import AttachedSimulator, Gateway
from cosmos_actor.simulator_bridge.leases import Lease, LeaseTable
from cosmos_actor.simulator_bridge.messages import Assignment, SlotFailure, Stepped

LOOK_S = 1.0
"""Between two looks at who has come meanwhile."""
DONE, ERROR = "done", "error"
"""What a record says about its unit."""

ActGreedily = Callable[[Mapping[str, np.ndarray], Sequence[Sequence[int]]], Awaitable[Acted]]
"""(observations, a key a row) -> the likeliest actions. Where they are found from a draw, the key decides it."""


class Evaluator:
    """For one evaluation. Lives on the loop of the actor's bus."""

    def __init__(self, gateway: Gateway, act: ActGreedily, limits: CollectLimits, attempts: int,
                 clock: Callable[[], float], tell: Callable[[dict[str, Any]], None], told: Told,
                 films: Films) -> None:
        """`told`: see Collector. `films` hears of every episode."""
        self.told, self.films = told, films
        self._gateway, self._act, self._limits, self._clock, self._tell = gateway, act, limits, clock, tell
        self._leases = LeaseTable(attempts=attempts, lease_s=float("inf"))
        self._records: dict[str, dict[str, Any]] = {}

    async def run(self, units: Sequence[WorkUnit]) -> list[dict[str, Any]]:
        """A record for each of `units`, in order. Waits for simulators as long as it takes."""
        for unit in units:
            self._leases.add(unit)
        driving: dict[str, asyncio.Task[None]] = {}
        try:
            while len(self._records) < len(units):
                for simulator in self._gateway.present if self._leases.waiting else ():
                    if simulator.name not in driving:
                        driving[simulator.name] = asyncio.ensure_future(_Drive(self, simulator).run())
                if driving:
                    await asyncio.wait(driving.values(), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(LOOK_S)  # nobody is here
                for name in [name for name, task in driving.items() if task.done()]:
                    driving.pop(name).result()
        finally:
            for task in driving.values():
                task.cancel()
        return [self._records[unit.unit_id] for unit in units]

    # ---- what a drive asks and says

    def next_unit(self, simulator: AttachedSimulator) -> Lease | None:
        return self._leases.take(simulator.name, self._clock())

    def ended(self, lease: Lease, facts: dict[str, Any]) -> None:
        if self._leases.done(lease):
            self._records[lease.unit.unit_id] = _record(lease.unit, DONE, facts)
            self.films.ended(lease.unit, facts["success"])

    def failed(self, lease: Lease, simulator: AttachedSimulator, kind: str, text: str) -> None:
        verdict = self._leases.failed(lease, kind)
        unit = lease.unit
        self.films.drop(unit)
        self._tell({"kind": kind, "text": text, "simulator": str(simulator), "unit": unit.unit_id,
                    "attempt": unit.attempt, "again": verdict.again})
        if not verdict.again:
            self._records[unit.unit_id] = _record(unit, ERROR, {
                "return": 0.0, "length": 0, "terminated": False, "success": UNKNOWN, "kind": kind,
                "simulator": simulator.description.simulator, "actor": simulator.name})

    def given_back(self, lease: Lease) -> None:
        """By one that left when it was asked to: that is no attempt."""
        self._leases.give_back(lease)
        self.films.drop(lease.unit)

    def lost(self, simulator: AttachedSimulator, error: SimulatorError) -> None:
        if error.kind in ("hang", "lost"):
            self._gateway.dismiss(simulator, error.text)

    async def act(self, observations: Mapping[str, np.ndarray], keys: Sequence[Sequence[int]]) -> Acted:
        return await self._act(observations, keys)

    @property
    def limits(self) -> CollectLimits:
        return self._limits


class _Drive:
    """One simulator, until no unit waits for it."""

    def __init__(self, evaluator: Evaluator, simulator: AttachedSimulator) -> None:
        self._evaluator, self._simulator = evaluator, simulator
        self._running: dict[int, Lease] = {}
        self._seen: dict[int, dict[str, np.ndarray]] = {}
        self._totals: dict[int, tuple[float, int]] = {}

    async def run(self) -> None:
        """Never raises for a simulator's error: what it was doing is failed, and it is left alone."""
        try:
            while await self._fill():
                await self._step()
        except SimulatorError as error:
            for lease in self._running.values():
                if self._simulator.left:
                    self._evaluator.given_back(lease)
                else:
                    self._evaluator.failed(lease, self._simulator, error.kind, error.text)
            self._running.clear()
            self._evaluator.lost(self._simulator, error)

    async def _fill(self) -> bool:
        """Begin units in free slots; whether anything runs."""
        fresh = []
        for slot in self._simulator.slots:
            if slot not in self._running and (lease := self._evaluator.next_unit(self._simulator)) is not None:
                self._running[slot], self._totals[slot] = lease, (0.0, 0)
                fresh.append(Assignment(slot, lease.unit))
        if fresh:
            answer = await self._simulator.reset(fresh, deadline_s=self._evaluator.limits.reset_s)
            for item in fresh:
                self._evaluator.films.begin(item.unit)
            self._look(answer)
            self._film(answer)
            self._drop(answer.failures)
        return bool(self._running)

    async def _step(self) -> None:
        slots = sorted(self._running)
        names = self._seen[slots[0]]
        observations = {name: np.stack([self._seen[slot][name] for slot in slots]) for name in names}
        observations.update(self._evaluator.told([self._running[slot].unit.task for slot in slots]))
        keys = [(self._running[slot].unit.seed, self._totals[slot][1]) for slot in slots]
        acted = await self._evaluator.act(observations, keys)
        films = self._evaluator.films
        between = acted.commands.shape[1] > 1 and any(
            films.wants_every_step(self._running[slot].unit) for slot in slots)
        answer = await self._simulator.step(slots, acted.commands, intermediate=between,
                                            deadline_s=self._evaluator.limits.chunk_s(acted.commands))
        self._drop(answer.failures)
        self._look(answer)
        self._film(answer)
        ended = set(answer.ended.tolist())
        for at, slot in enumerate(answer.slots.tolist()):
            total, length = self._totals[slot]
            self._totals[slot] = (total + float(answer.rewards[at].sum()), length + int(answer.steps[at]))
            if slot in ended:
                self._end(slot, bool(answer.terminated[at]), int(answer.success[at]))

    def _look(self, answer: Stepped) -> None:
        for at, slot in enumerate(answer.slots.tolist()):
            self._seen[slot] = {name: column[at] for name, column in answer.observations.items()}

    def _film(self, answer: Stepped) -> None:
        """What was seen between the actions, if it was asked for, and after the last one."""
        for at, slot in enumerate(answer.slots.tolist()):
            unit, before, steps = self._running[slot].unit, self._totals[slot][1], int(answer.steps[at])
            for k in range(steps - 1 if answer.intermediate else 0):
                between = {name: column[at, k] for name, column in answer.intermediate.items()}
                self._evaluator.films.add(unit, between, before + k + 1)
            self._evaluator.films.add(unit, self._seen[slot], before + steps)

    def _end(self, slot: int, terminated: bool, success: int) -> None:
        total, length = self._totals.pop(slot)
        self._evaluator.ended(self._running.pop(slot), {
            "return": total, "length": length, "terminated": terminated, "success": success,
            "simulator": self._simulator.description.simulator, "actor": self._simulator.name})

    def _drop(self, failures: Sequence[SlotFailure]) -> None:
        for failure in failures:
            lease = self._running.pop(failure.slot, None)
            if lease is not None:
                self._evaluator.failed(lease, self._simulator, failure.kind, failure.text)


def _record(unit: WorkUnit, outcome: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {"unit": unit.unit_id, "task": unit.task, "seed": unit.seed, "initial_state": unit.initial_state,
            "attempt": unit.attempt, "outcome": outcome, **facts}
