"""Buses for a test, over either transport, closed at its end whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from cosmos_actor.bus import (
    Bus,
    Identity,
    KeyRing,
    Limits,
    MemoryNetwork,
    MemoryTransport,
    ZmqTransport,
    make_run_keys,
    new_incarnation,
)
from cosmos_actor.bus.clock import Clock

TEST_LIMIT_S = 30.0
NO_TIMER = Limits(heartbeat_interval_s=1000.0, lost_after_s=10_000.0)
"""The test ticks the buses itself."""
RUN = "run-1"
ROLES = ("controller", "policy", "rollout")


class World:
    """`run(scenario)` runs an async function with this world and closes its buses."""

    def __init__(self, kind: str, keys: dict[str, KeyRing]) -> None:
        self.kind = kind
        self.keys = keys
        self.network = MemoryNetwork()
        self.buses: list[Bus] = []

    def run(self, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        asyncio.run(asyncio.wait_for(self._scenario(scenario), TEST_LIMIT_S))

    async def _scenario(self, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        try:
            await scenario(self)
        finally:
            for bus in self.buses:
                await bus.close(0)

    def bus(self, role: str, actor: str = "", *, run_id: str = RUN, keys: KeyRing | None = None, **options: Any) -> Bus:
        identity = Identity(run_id, role, actor or f"{role}-0", options.pop("incarnation", new_incarnation()))
        if self.kind == "memory":
            made = Bus(identity, MemoryTransport(self.network), None, **options)
        else:
            made = Bus(identity, ZmqTransport(), keys or self.keys[role], **options)
        self.buses.append(made)
        return made

    @property
    def anywhere(self) -> str:
        return "memory://" if self.kind == "memory" else "tcp://127.0.0.1:0"

    async def pair(
        self, *, prepare: Callable[[Bus], None] = lambda bus: None, **options: Any
    ) -> tuple[Bus, Bus, Any]:
        """(dialling controller, listening rollout, the former's link); `prepare` registers the rollout's handlers."""
        near, far = self.bus("controller", **options), self.bus("rollout", **options)
        prepare(far)
        address = await far.start(self.anywhere)
        await near.start(self.anywhere)
        return near, far, await near.connect(address, role="rollout", actor="rollout-0")

    def cut(self, bus: Bus) -> None:
        """Break every wire that this bus has dialled, as a pulled plug would."""
        for dialler in list(bus.diallers):
            wire = dialler._wire
            if wire is None:
                continue
            if self.kind == "memory":
                wire.cut()
            else:
                wire._down("cut by the test", False)


class FakeClock(Clock):
    """Stands still until told."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


async def eventually(condition: Callable[[], Any], what: str, limit_s: float = 5.0) -> None:
    """Let the loop run until the condition holds."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + limit_s
    while not condition():
        assert loop.time() < ends, f"not within {limit_s} s: {what}"
        await asyncio.sleep(0.001)


def make_keys(directory: Path) -> dict[str, KeyRing]:
    paths = make_run_keys(directory, RUN, ROLES)
    return {role: KeyRing.load(path) for role, path in paths.items()}


class Meddler:
    """Stands before a link's wire; `meddle(frames)` returns what is really sent, None to swallow it."""

    def __init__(self, link: Any, meddle: Callable[[list[Any]], list[Any] | None]) -> None:
        self.wire = link.out.wire
        self.name, self.role = self.wire.name, self.wire.role
        self.meddle = meddle
        link.out.wire = self

    def send(self, frames: list[Any]) -> bool:
        kept = self.meddle(frames)
        return True if kept is None else bool(self.wire.send(kept))

    def close(self) -> None:
        self.wire.close()
