"""A driver and simulators on one loop: the real gateway, collector, leases and checked sessions, worlds that count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from cosmos_actor.actors.fragment import CollectTask
from cosmos_actor.bus import Bus, Identity, MemoryNetwork, MemoryTransport, new_incarnation
from cosmos_actor.roles.acting import Acted, BatchedActing
from cosmos_actor.roles.collector import CollectLimits, Collector
from cosmos_actor.simulator_bridge.checked import CheckedSession
from cosmos_actor.simulator_bridge.contract import (
    DISCRETE,
    ActionSpec,
    ArraySpec,
    Description,
    Environment,
    TaskSpec,
    WorkUnit,
)
from cosmos_actor.simulator_bridge.gateway import Gateway
from cosmos_actor.simulator_bridge.leases import LeaseTable
from cosmos_actor.simulator_bridge.messages import Attach, Detach, Reset, Step
from cosmos_actor.simulator_bridge.slots import EachSlot

RUN = "yard"
KIND = "test:count"
DESCRIPTION = Description(KIND, [TaskSpec("count", max_steps=1000)], {"state": ArraySpec("float32", (2,))},
                          ActionSpec(DISCRETE, n=4))


def length_of(seed: int) -> int:
    """Steps of an episode."""
    return 3 + seed % 5


class Count(Environment):
    """Sees (seed, steps so far), gets the number of the step as reward, and ends after `length_of(seed)` steps."""

    def __init__(self) -> None:
        self.seed, self.at = 0, 0

    def reset(self, unit: WorkUnit) -> None:
        self.seed, self.at = unit.seed, 0

    def step(self, action: Any) -> tuple[float, bool, bool]:
        self.at += 1
        over = self.at == length_of(self.seed)
        return float(self.at), over and self.seed % 2 == 0, over and self.seed % 2 == 1

    def observe(self) -> dict[str, np.ndarray]:
        return {"state": np.array([self.seed, self.at], np.float32)}


class Simulator:
    """One attached process, played on this loop."""

    def __init__(self, yard: Yard, name: str, envs: int, make: Callable[[], Environment], session: str = "") -> None:
        self.name, self.envs = name, envs
        self.checked = CheckedSession(EachSlot(make, envs), DESCRIPTION, envs)
        self.session = session or name
        self.answering = asyncio.Event()
        self.answering.set()
        self._yard = yard
        self.bus: Bus

    async def attach(self) -> Simulator:
        identity = Identity(RUN, "simulator", self.name, new_incarnation())
        self.bus = Bus(identity, MemoryTransport(self._yard.network), None)

        async def answer(request: Any, link: Any) -> Any:
            await self.answering.wait()
            return self.checked.answer(request)

        self.bus.serve(Reset, answer)
        self.bus.serve(Step, answer)
        await self.bus.start(None)
        self.link = await self.bus.connect(self._yard.address, role="rollout")
        attached = await self.link.call(Attach(self.session, self.envs, DESCRIPTION), deadline_s=5.0)
        if not attached.resumed:
            self.checked.forget()
        self.resumed = attached.resumed
        return self

    async def leave(self) -> None:
        await self.link.call(Detach("it was asked to"), deadline_s=5.0)
        await self.bus.close(0.1)

    async def die(self) -> None:
        """No word more; the link ends as that of a killed process does."""
        for dialler in list(self.bus.diallers):
            dialler.stop()
        self.answering.clear()
        self._yard.bus.forget(self.name, self.bus.identity.incarnation, "killed")


class Yard:
    """Start with `open`. Policy: action = step number mod 4, log-prob and value are what is seen."""

    def __init__(self, *, attempts: int = 3, step_s: float = 5.0, resume_s: float = 0.05, most_given_up: int = 2,
                 max_wait_s: float = 0.05, lease_s: float = 60.0) -> None:
        self.network = MemoryNetwork()
        self.bus = Bus(Identity(RUN, "rollout", "rollout-0", new_incarnation()), MemoryTransport(self.network), None)
        self.gateway = Gateway(self.bus, resume_s=resume_s, silent_s=5.0)
        self.told: list[dict[str, Any]] = []
        self.rows: list[int] = []
        self.leases = LeaseTable(attempts=attempts, lease_s=lease_s)
        self.acting = BatchedActing(self._act, max_wait_s)
        self.version = 7
        self._limits = CollectLimits(step_s=step_s, reset_s=step_s, most_given_up=most_given_up)

    async def open(self) -> Yard:
        self.address = await self.bus.start("memory://rollout-0")
        self.collector = Collector(
            self.gateway, self.acting, self.leases, lambda number: WorkUnit(f"u{number}", "count", seed=number),
            lambda generator, rows: generator.random(rows), self._limits, asyncio.get_running_loop().time,
            self.told.append, prefix="c", told=lambda tasks: {})
        return self

    async def attach(self, name: str, envs: int = 2, make: Callable[[], Environment] = Count) -> Simulator:
        return await Simulator(self, name, envs, make).attach()

    async def _act(self, observations: Any, noise: np.ndarray) -> Acted:
        state = observations["state"]
        self.rows.append(len(state))
        actions = (state[:, 1].astype(np.int64)) % 4
        return Acted(actions, state[:, 0].copy(), state[:, 1].copy(), self.version, actions[:, None])


def tasks(count: int, steps: int = 8) -> list[CollectTask]:
    return [CollectTask(f"f{at:02d}", 0, steps, first_unit=100 * at, seed=at) for at in range(count)]


def check(found: dict[str, Any], steps: int = 8) -> None:
    """The columns are of episodes that were really made: each row follows from the one before."""
    columns = found["columns"]
    state, rewards = columns["observations"]["state"], columns["simulator_rewards"]
    ended = (columns["terminated"] | columns["truncated"]).astype(bool)
    assert state.shape == (steps, 2) and np.array_equal(rewards, state[:, 1] + 1)
    lengths = np.array([length_of(int(seed)) for seed in state[:, 0]])
    assert np.array_equal(ended, rewards == lengths)
    assert np.array_equal(columns["terminated"].astype(bool), ended & (state[:, 0] % 2 == 0))
    for at in range(steps - 1):
        follows = [state[at, 0], state[at, 1] + 1]
        assert state[at + 1, 1] == 0 if ended[at] else state[at + 1].tolist() == follows
    boundary = np.flatnonzero(columns["boundary"])
    assert boundary.tolist() == sorted({*np.flatnonzero(ended).tolist(), steps - 1})
    assert columns["after"]["state"].tolist() == [[state[at, 0], rewards[at]] for at in boundary]
    assert np.array_equal(columns["logprobs"], state[:, 0]) and np.array_equal(columns["values"], state[:, 1])
    assert np.array_equal(columns["actions"], state[:, 1].astype(np.int64) % 4)
