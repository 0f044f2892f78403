"""Consumers that are killed or stopped while they work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

from cosmos_actor.bus import Limits, PeerLost, make_run_keys
from tests.bus.messages import Number
from tests.bus.world import ROLES, RUN, World, eventually
from tests.waiting import stop

Popen = Callable[..., "subprocess.Popen[Any]"]
MESSAGES = 300


class Consumers:
    """Rollouts in processes, by actor name."""

    def __init__(self, folder: Path, popen: Popen) -> None:
        self.keys = make_run_keys(folder, RUN, ROLES)["rollout"]
        self.popen = popen

    def start(self, actor: str) -> tuple[Any, str, str]:
        """(process, address, incarnation)"""
        command = [sys.executable, "-m", "tests.bus.consumer", str(self.keys), actor]
        root = Path(__file__).parents[2]
        process = self.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        address, incarnation = process.stdout.readline().split()
        return process, address, incarnation


@pytest.fixture
def consumers(tmp_path: Path, popen: Popen) -> Consumers:
    return Consumers(tmp_path, popen)


@pytest.fixture
def world(consumers: Consumers) -> World:
    from cosmos_actor.bus import KeyRing

    return World("zmq", {"controller": KeyRing.load(consumers.keys.with_name("controller.key"))})


def test_a_killed_consumer_loses_nothing(world: World, consumers: Consumers) -> None:
    async def scenario(world: World) -> None:
        bus = world.bus("controller")
        await bus.start(None)
        process, address, incarnation = consumers.start("rollout-0")
        link = await bus.connect(address, role="rollout", actor="rollout-0")
        receipts = {value: await link.send_work(Number(value)) for value in range(MESSAGES)}
        await receipts[20].result(10)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(5)
        bus.forget("rollout-0", incarnation, "killed by SIGKILL")
        handled_there = [int(line) for line in process.stdout]
        done, lost = [], []
        for value, receipt in receipts.items():
            try:
                assert (await receipt.result(1)).value == value + 1
                done.append(value)
            except PeerLost as error:
                assert error.reason == "killed by SIGKILL"
                lost.append(value)
        assert lost and set(done) <= set(range(handled_there[-1] + 1))
        second, address, _ = consumers.start("rollout-0")
        link = await bus.connect(address, role="rollout", actor="rollout-0")
        again = [await link.send_work(Number(value)) for value in lost]
        assert [(await receipt.result(10)).value for receipt in again] == [value + 1 for value in lost]
        assert sorted(done + lost) == list(range(MESSAGES))
        second.stdin.close()
        assert second.wait(5) == 0

    world.run(scenario)


def test_a_stopped_process_is_lost_and_refused_when_it_wakes(world: World, consumers: Consumers) -> None:
    async def scenario(world: World) -> None:
        bus = world.bus("controller", limits=Limits(heartbeat_interval_s=0.1, lost_after_s=1.0))
        await bus.start(None)
        process, address, _ = consumers.start("rollout-0")
        link = await bus.connect(address, role="rollout", actor="rollout-0")
        stop(process.pid)
        receipt = await link.send_work(Number(1))
        with pytest.raises(PeerLost, match="no frame for 1"):
            await receipt.result(10)
        os.kill(process.pid, signal.SIGCONT)
        await eventually(lambda: bus.statistics()["links"] == {}, "no link")
        link = await bus.connect(address, role="rollout", actor="rollout-0", deadline_s=10)
        assert (await link.call(Number(2), deadline_s=10)).value == 3
        process.stdin.close()
        assert process.wait(5) == 0

    world.run(scenario)


def test_a_consumer_that_leaves_properly_finishes_its_work(world: World, consumers: Consumers) -> None:
    async def scenario(world: World) -> None:
        bus = world.bus("controller")
        await bus.start(None)
        process, address, _ = consumers.start("rollout-0")
        link = await bus.connect(address, role="rollout")
        receipts = [await link.send_work(Number(value)) for value in range(50)]
        await receipts[0].result(10)
        process.stdin.close()
        assert [(await receipt.result(10)).value for receipt in receipts] == list(range(1, 51))
        await eventually(lambda: not bus.links, "goodbye")
        assert process.wait(5) == 0
        assert link.lost == "it said goodbye: closed"

    world.run(scenario)


