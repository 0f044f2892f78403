"""Faults on purpose: what the words mean, that each really happens, and that a run of the same seed meets the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cosmos_actor.bus import Bus, BusError, Identity, MemoryNetwork, MemoryTransport, PeerLost
from cosmos_actor.bus.faults import Faults, FaultyTransport, Partition
from cosmos_actor.bus.limits import Limits
from tests.bus.messages import Number
from tests.bus.world import eventually


def test_words() -> None:
    found = Faults.parse("drop=0.01,dup=0.02, reorder=0.03,corrupt=0.004,delay=50ms,partition=rollout:5s,"
                         "partition=reward:1s@2.5s", seed=7)
    assert found == Faults(0.01, 0.02, 0.03, 0.004, 0.05, (Partition("rollout", 5.0), Partition("reward", 1.0, 2.5)), 7)
    assert Faults.parse("") == Faults()


@pytest.mark.parametrize(("text", "says"), [
    ("drip=0.1", "unknown fault 'drip': there are drop, dup, reorder, corrupt, delay and partition"),
    ("drop=1", "drop=1: a probability is at least 0 and below 1"),
    ("drop=-0.5", "at least 0"),
    ("drop=nan", "at least 0"),
    ("drop=often", "drop=often: expected a number"),
    ("drop=0.1,drop=0.2", "drop is given twice"),
    ("delay=1s,delay=2s", "delay is given twice"),
    ("delay=50", "delay=50: expected a time such as 50ms or 5s"),
    ("partition=5s", "expected a time"),
    ("partition=:5s", "expected partition=ROLE:5s"),
    ("partition=rollout:5s@soon", "expected a time"),
])
def test_wrong_words_are_one_line(text: str, says: str) -> None:
    with pytest.raises(BusError) as caught:
        Faults.parse(text)
    assert says in str(caught.value) and caught.value.setting == "bus.faults"


class Pair:
    """Two buses of one network; only the sender's messages suffer."""

    def __init__(self, faults: Faults, **limits: Any) -> None:
        network = MemoryNetwork()
        self.transport = FaultyTransport(MemoryTransport(network), faults)
        options = {"limits": Limits(**limits)}
        self.near = Bus(Identity("run", "controller", "controller-0", "a"), self.transport, None, **options)
        self.far = Bus(Identity("run", "rollout", "rollout-0", "b"), MemoryTransport(network), None, **options)
        self.seen: list[int] = []
        self.far.serve(Number, lambda message, link: self.seen.append(message.value))

    async def link(self) -> Any:
        address = await self.far.start("memory://far")
        await self.near.start(None)
        return await self.near.connect(address, role="rollout")

    async def close(self) -> None:
        await self.near.close(0)
        await self.far.close(0)


@pytest.mark.parametrize(("words", "counted"), [
    ("drop=0.3", "dropped"), ("dup=0.3", "duplicated"), ("reorder=0.3", "reordered"), ("corrupt=0.2", "corrupted"),
])
def test_each_fault_happens_and_loses_nothing(words: str, counted: str) -> None:
    async def scenario() -> None:
        pair = Pair(Faults.parse(words, seed=1), heartbeat_interval_s=0.05, lost_after_s=30, handshake_s=0.2)
        link = await pair.link()
        for value in range(60):
            await (await link.send_work(Number(value))).result(10)
        assert pair.seen == list(range(60))
        assert pair.transport.count[counted] > 5
        await pair.close()

    asyncio.run(scenario())


def test_delay_keeps_the_order_and_takes_time() -> None:
    async def scenario() -> None:
        pair = Pair(Faults.parse("delay=20ms", seed=1))
        link = await pair.link()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for value in range(20):
            await (await link.send_work(Number(value))).result(10)
        assert pair.seen == list(range(20)) and loop.time() - begun > 0.1
        assert link.statistics()["receiving"]["channels"]["work"]["gaps"] == 0
        await pair.close()

    asyncio.run(scenario())


def test_a_partition_begins_and_ends() -> None:
    async def scenario() -> None:
        pair = Pair(Faults.parse("partition=controller:1s@1s,partition=rollout:60s@0s"),
                    heartbeat_interval_s=0.05, lost_after_s=10)
        link = await pair.link()
        await (await link.send_work(Number(1))).result(5)
        await eventually(pair.transport.cut_off, "the partition begins")
        receipt = await link.send_work(Number(2))
        await receipt.result(5)
        assert pair.seen == [1, 2] and pair.transport.count["partitioned"] > 0 and not pair.transport.cut_off()
        await pair.close()

    asyncio.run(scenario())


def test_a_partition_longer_than_the_bus_waits_is_a_loss_with_a_reason() -> None:
    async def scenario() -> None:
        pair = Pair(Faults.parse("partition=controller:60s@1s"), heartbeat_interval_s=0.05, lost_after_s=0.5)
        link = await pair.link()
        await eventually(pair.transport.cut_off, "the partition begins")
        receipt = await link.send_work(Number(1))
        with pytest.raises(PeerLost, match="no frame for"):
            await receipt.result(5)
        await pair.close()

    asyncio.run(scenario())


def test_a_seed_meets_the_same_faults_again() -> None:
    async def scenario() -> list[dict[str, int]]:
        pair = Pair(Faults.parse("drop=0.2,dup=0.2", seed=5), heartbeat_interval_s=1000, lost_after_s=3000)
        link = await pair.link()
        for value in range(40):
            await link.send_work(Number(value))
            await asyncio.sleep(0)
        await pair.close()
        return [dict(pair.transport.count)]

    assert asyncio.run(scenario()) == asyncio.run(scenario())
