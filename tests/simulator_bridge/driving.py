"""A gateway on a bus of its own, and what a test asks of the simulator that attaches to it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Awaitable, Callable

import numpy as np

from cosmos_actor.bus import Bus, Identity, KeyRing, Limits, ZmqTransport, new_incarnation
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.simulator_bridge.gateway import AttachedSimulator, Gateway
from cosmos_actor.simulator_bridge.messages import Stepped
from tests.simulator_bridge.driver import eventually

LIMIT_S = 60.0


def driving(keys: dict[str, Path], play: Callable[[Gateway, str], Awaitable[None]], *, silent_s: float = 5.0,
            resume_s: float = 5.0, squeeze: str = "none", **limits: Any) -> None:
    async def run() -> None:
        ring = KeyRing.load(keys["rollout"])
        bus = Bus(Identity(ring.run_id, "rollout", "rollout-0", new_incarnation()), ZmqTransport(), ring,
                  bulk=BulkSettings(), limits=Limits(**limits))
        gateway = Gateway(bus, resume_s=resume_s, silent_s=silent_s, squeeze=squeeze)
        try:
            await play(gateway, await bus.start("tcp://127.0.0.1:0"))
        finally:
            await bus.close(0)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


async def attached(gateway: Gateway, *, lane: bool = True) -> AttachedSimulator:
    await eventually(lambda: gateway.present, "a simulator attaches")
    [simulator] = gateway.present
    if lane:
        await eventually(lambda: simulator._lane is not None and simulator._lane._ready, "its lane is open")
    return simulator


def by_lane(simulator: AttachedSimulator) -> int:
    return int(simulator.statistics()["past_the_bus"])


async def step(simulator: AttachedSimulator, actions: Any, slots: Any = None, **more: Any) -> Stepped:
    return await simulator.step(simulator.slots if slots is None else slots, np.array(actions), deadline_s=10.0, **more)


def plain(stepped: Stepped) -> Any:
    """All of it but the time that it took."""
    def of(arrays: Any) -> Any:
        return {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()}

    return (stepped.number, of(stepped.observations), of({"rewards": stepped.rewards, "rows": stepped.rows}),
            of(stepped.final_observations), of(stepped.intermediate), stepped.failures)
