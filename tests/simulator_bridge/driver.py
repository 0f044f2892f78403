"""The other end of the bridge, as a bus that takes in whoever attaches; and simulators to attach in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.bus import Bus, Identity, KeyRing, ZmqTransport, make_run_keys, new_incarnation
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.simulator_bridge.checked import CheckedSession
from cosmos_actor.simulator_bridge.contract import Simulator, WorkUnit
from cosmos_actor.simulator_bridge.messages import Assignment, Attach, Attached, Detach, Reset, Step, Stepped
from cosmos_actor.simulator_bridge.pace import Pace
from cosmos_actor.simulator_bridge.server import Ending, Place, SimulatorServer
from tests.simulator_bridge.worlds import CounterSimulator

LIMIT_S = 20.0
ROLES = ("rollout", "simulator")


class AttachRefused(Exception):
    """Named as the gateway's."""


class Driver:
    """`offers` and `left`: who came and went. `refusal`: what is said to whoever comes."""

    def __init__(self, keys: dict[str, Path], **options: Any) -> None:
        ring = KeyRing.load(keys["rollout"])
        self.bus = Bus(Identity(ring.run_id, "rollout", "rollout-0", new_incarnation()), ZmqTransport(), ring,
                       bulk=BulkSettings(), **options)
        self.refusal = ""
        self.offers: list[Attach] = []
        self.left: list[str] = []
        self.links: list[Any] = []
        self.known: set[str] = set()
        self.number = 0
        self.bus.serve(Attach, self._attach)
        self.bus.serve(Detach, self._detach)

    def _attach(self, offer: Attach, link: Any) -> Attached:
        if self.refusal:
            raise AttachRefused(self.refusal)
        resumed = offer.session in self.known
        if not resumed:
            self.number = 0
        self.known.add(offer.session)
        self.offers.append(offer)
        self.links.append(link)
        return Attached("rollout-0", resumed)

    def _detach(self, farewell: Detach, link: Any) -> None:
        self.left.append(farewell.reason)

    async def attached(self, times: int = 1) -> Attach:
        await eventually(lambda: len(self.offers) >= times, f"{times} simulators attach")
        return self.offers[-1]

    async def reset(self, units: dict[int, WorkUnit], queue: dict[int, WorkUnit] | None = None) -> Stepped:
        self.number += 1
        return await self.ask(Reset(self.number, assigned(units), assigned(queue or {})))

    async def step(self, slots: list[int], actions: Any, queue: Any = ()) -> Stepped:
        self.number += 1
        return await self.ask(Step(self.number, np.array(actions), np.array(slots, np.int32), list(queue)))

    async def ask(self, request: Any) -> Stepped:
        return await self.links[-1].call(request, deadline_s=LIMIT_S)


def assigned(units: dict[int, WorkUnit]) -> list[Assignment]:
    return [Assignment(slot, item) for slot, item in units.items()]


class Attaching:
    """A simulator served in this process, beside its driver."""

    def __init__(self, address: str, key: Path, *, simulator: Simulator | None = None, envs: int = 2,
                 rejoin_s: float = 10.0, max_memory_bytes: int = 0, name: str = "sim-0") -> None:
        simulator = simulator or CounterSimulator("counter:1")
        self.lines: list[str] = []
        self.session = simulator.open(envs)
        pace = Pace()
        checked = CheckedSession(self.session, simulator.describe(), envs, pace=pace)
        self.server = SimulatorServer(
            checked, Attach(new_incarnation(), envs, simulator.describe()),
            Place(address, name, KeyRing.load(key), rejoin_s, max_memory_bytes), pace, say=self.lines.append)
        self.task = asyncio.ensure_future(self.server.run())

    async def ending(self) -> Ending:
        return await asyncio.wait_for(self.task, LIMIT_S)


def scenario(keys: dict[str, Path], play: Callable[[Driver, str], Any], **options: Any) -> None:
    """`play(driver, its address)`. The driver is closed whatever happens; simulators are cancelled with the loop."""

    async def run() -> None:
        driver = Driver(keys, **options)
        try:
            await play(driver, await driver.bus.start("tcp://127.0.0.1:0"))
        finally:
            await driver.bus.close(0)

    asyncio.run(asyncio.wait_for(run(), 2 * LIMIT_S))


async def eventually(condition: Callable[[], Any], what: str) -> None:
    loop = asyncio.get_running_loop()
    ends = loop.time() + LIMIT_S
    while not condition():
        assert loop.time() < ends, f"not within {LIMIT_S:g} s: {what}"
        await asyncio.sleep(0.005)


def make_keys(folder: Path, run_id: str = "sim-run") -> dict[str, Path]:
    return make_run_keys(folder, run_id, ROLES)
