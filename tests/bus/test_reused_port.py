"""A peer dies and somebody else listens at its port: it is not taken for the old one, and the link is over in time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest
import zmq

from cosmos_actor.bus import KeyRing, Limits, PeerLost, make_run_keys
from tests.bus import strangers
from tests.bus.messages import Number
from tests.bus.test_kill import Consumers
from tests.bus.world import ROLES, RUN, World
from tests.waiting import stop

LOST_AFTER_S = 3.0
LIMITS = Limits(heartbeat_interval_s=0.2, lost_after_s=LOST_AFTER_S)
TOLD_WITHIN_S = 10.0
"""Redials, a handshake and the deadline, on a busy machine."""


class Scene:
    """A controller here, a rollout in a process of its own, and whoever comes after it at its port."""

    def __init__(self, folder: Path, popen: Callable[..., "subprocess.Popen[Any]"]) -> None:
        self.folder = folder
        self.consumers = Consumers(folder, popen)
        self.handled: List[int] = []
        self.keys: Dict[str, KeyRing] = {
            role: KeyRing.load(self.consumers.keys.with_name(f"{role}.key")) for role in ROLES}
        self.world = World("zmq", self.keys)

    async def successor(self, address: str, role: str = "rollout", actor: str = "rollout-1", **options: Any) -> None:
        bus = self.world.bus(role, actor, **options)
        bus.serve(Number, lambda message, link: self.handled.append(message.value))
        assert await bus.start(address) == address

    async def lost(self, wanted_actor: Any, comes: Any) -> str:
        """Kill the rollout with work under way, let `comes(address)` take its port; why the link is over."""
        near = self.world.bus("controller", limits=LIMITS)
        await near.start(None)
        process, address, _ = self.consumers.start("rollout-0")
        link = await near.connect(address, role="rollout", actor=wanted_actor)
        assert (await link.call(Number(1), deadline_s=10)).value == 2
        stop(process.pid)
        receipts = [await link.send_work(Number(value)) for value in range(20)]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        begun = time.monotonic()
        await comes(address)
        for receipt in receipts:
            with pytest.raises(PeerLost) as caught:
                await receipt.result(TOLD_WITHIN_S)
        assert time.monotonic() - begun < TOLD_WITHIN_S
        assert self.handled == [] and near.links == {}
        return str(caught.value.reason)


@pytest.fixture
def scene(tmp_path: Path, popen: Callable[..., Any]) -> Scene:
    return Scene(tmp_path, popen)


@pytest.mark.parametrize("wanted", [None, "rollout-0"])
def test_another_actor_of_the_role(scene: Scene, wanted: Any) -> None:
    async def scenario(world: World) -> None:
        reason = await scene.lost(wanted, scene.successor)
        says = "here is rollout-1" if wanted else "another process answers at its address: rollout-1"
        assert says in reason

    scene.world.run(scenario)


def test_the_next_life_of_the_same_actor(scene: Scene) -> None:
    async def scenario(world: World) -> None:
        reason = await scene.lost("rollout-0", lambda address: scene.successor(address, actor="rollout-0"))
        assert "another process answers at its address: rollout-0" in reason

    scene.world.run(scenario)


def test_an_actor_of_another_role(scene: Scene) -> None:
    async def scenario(world: World) -> None:
        reason = await scene.lost("rollout-0", lambda address: scene.successor(address, "policy", "policy-0"))
        assert reason.startswith("another process answers at its address: wrong server key")

    scene.world.run(scenario)


def test_an_actor_of_another_run(scene: Scene) -> None:
    """Of the same name even, and of another run's keys."""
    others = KeyRing.load(make_run_keys(scene.folder / "other", RUN, ROLES)["rollout"])

    async def scenario(world: World) -> None:
        reason = await scene.lost("rollout-0", lambda at: scene.successor(at, actor="rollout-0", keys=others))
        assert reason.startswith("another process answers at its address: wrong server key")

    scene.world.run(scenario)


@contextmanager
def web_server(address: str) -> Iterator[None]:
    """Answers whatever comes as a web server does."""
    with strangers.listener(strangers.raw_bytes, int(address.rpartition(":")[2])):
        yield


@contextmanager
def without_keys(address: str) -> Iterator[None]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(address)
        yield


@pytest.mark.parametrize(("stranger", "words"), [
    (web_server, ("no handshake: the listener hung up", "wrong server key")), (without_keys, ("no CURVE", "is no bus")),
], ids=["raw bytes", "NULL"])
def test_what_is_no_bus(scene: Scene, stranger: Any, words: Any) -> None:
    """Two words where the kernel decides whether its answer or its end is heard first."""

    async def scenario(world: World) -> None:
        opened: List[Any] = []

        async def comes(address: str) -> None:
            opened.append(stranger(address))
            opened[0].__enter__()

        try:
            reason = await scene.lost("rollout-0", comes)
        finally:
            for one in opened:
                one.__exit__(None, None, None)
        assert any(word in reason for word in words), reason

    scene.world.run(scenario)
