"""A process that holds its interpreter lock beyond `bus.lost_after_s`: kept with a declared pause, lost without."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_actor.actors.head import Head
from cosmos_actor.bus import Bus, Identity, KeyRing, PeerLost, ZmqTransport, make_run_keys
from tests.actors.programs.holding_actor import LIMITS
from tests.actors.small_cluster import Question
from tests.project.source import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

HOLD_S = 2 * LIMITS.lost_after_s


async def ask_one_that_holds(popen, folder: Path, how: str) -> int:
    """The answer's number, over a head and a link of their own."""
    make_run_keys(folder, "run", ("registry", "rollout"))
    keys = KeyRing.load(folder / "registry.key")
    head = Head(Bus(Identity("run", "registry", "registry-0", "1"), ZmqTransport(), keys, limits=LIMITS), {}, 0)
    address = await head.start("tcp://127.0.0.1:0")
    try:
        popen([sys.executable, "-m", "tests.actors.programs.holding_actor", str(folder / "rollout.key"), address,
               str(HOLD_S), how], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
        while not (member := head.registry.member("rollout-0")) or not member.ready:
            await asyncio.sleep(0.05)
        link = head.bus.links["rollout-0"]
        receipt = await link.send_work(Question(5), deadline_s=10.0)
        return (await receipt.result(4 * HOLD_S)).number
    finally:
        await head.bus.close(drain_s=0.1)


def test_with_a_declared_pause_it_is_waited_for(popen, tmp_path):
    assert asyncio.run(ask_one_that_holds(popen, tmp_path, "pause")) == 5


def test_without_one_it_is_lost_and_whoever_asked_knows(popen, tmp_path):
    with pytest.raises(PeerLost, match="no frame for"):
        asyncio.run(ask_one_that_holds(popen, tmp_path, "no_pause"))
