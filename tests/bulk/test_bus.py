"""Arrays over the threshold through the bus, on both transports: by reference, seen without a copy, and given back."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

from cosmos_actor.bus import Bus, KeyRing, Limits, MemoryNetwork, MemoryTransport, ZmqTransport, make_run_keys
from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.bulk.settings import KIB, MIB, BulkSettings
from cosmos_actor.bus.errors import BulkGone, DeadlineExceeded, MessageTooLarge, PeerLost, RemoteError
from cosmos_actor.bus.schema import schema
from tests.bulk.messages import Ask, Batch, Sum
from tests.bulk.tools import identity, pattern

ROLES = ("rollout", "controller", "policy")


class World:
    """Buses of one run over one transport."""

    def __init__(self, kind: str, keys: dict[str, KeyRing]) -> None:
        self.kind, self._keys, self._network = kind, keys, MemoryNetwork()
        self.buses: list[Bus] = []

    def bus(self, actor: str, budget: int = 8 * MIB, **options: Any) -> Bus:
        who = identity(actor)
        keys = self._keys[who.role] if self.kind == "zmq" else None
        transport = ZmqTransport() if self.kind == "zmq" else MemoryTransport(self._network)
        bus = Bus(who, transport, keys, limits=Limits(default_deadline_s=20.0),
                  bulk=BulkSettings(budget_bytes=budget), **options)
        self.buses.append(bus)
        return bus

    async def close(self) -> None:
        for bus in reversed(self.buses):
            await bus.close(drain_s=1.0)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KeyRing]:
    made = make_run_keys(tmp_path_factory.mktemp("keys"), "run", ROLES)
    return {role: KeyRing.load(Path(path)) for role, path in made.items()}


@pytest.fixture(params=["memory", "zmq"])
def world(request: pytest.FixtureRequest, keys: dict[str, KeyRing]) -> Any:
    """Runs a test body in a world and closes it."""

    def run(body: Callable[[World], Awaitable[None]]) -> None:
        async def main() -> None:
            made = World(request.param, keys)
            try:
                await body(made)
            finally:
                await made.close()

        asyncio.run(main())

    return run


@asynccontextmanager
async def two(world: World, handler: Any, **options: Any) -> AsyncIterator[Any]:
    """(sender, receiver, sender's link): the receiver serves Batch with `handler`."""
    sender, receiver = world.bus("rollout-0"), world.bus("policy-0", **options)
    receiver.serve(Batch, handler)
    address = await receiver.start()
    await sender.start()
    yield sender, receiver, await sender.connect(address, role="policy")


async def emptied(bus: Bus) -> None:
    """The bus's store holds nothing any more."""
    for _ in range(2000):
        gc.collect(0)
        if bus.bulk.store.statistics()["leases"] == 0:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"still held: {bus.bulk.store.statistics()}")


def test_a_large_array_is_seen_without_a_copy_and_given_back_when_the_handler_is_done(world: Any) -> None:
    async def body(made: World) -> None:
        seen = []

        def handler(batch: Batch, link: Any) -> Sum:
            assert isinstance(batch.image, np.ndarray) and not batch.image.flags.writeable
            seen.append(receiver.bulk.reader.statistics()["view_bytes"])
            return Sum(int(batch.image.sum()))

        async with two(made, handler) as (sender, receiver, link):
            image = pattern(MIB)
            answer = await link.call(Batch("a", image, np.ones(3, np.float32)), deadline_s=20.0)
            assert answer.total == int(image.sum()) and seen == [MIB]
            assert sender.bulk.store.statistics()["put_bytes"] == MIB, "the small array stays in the message"
            await emptied(sender)

    world(body)


def test_a_view_that_a_handler_keeps_keeps_the_bytes(world: Any) -> None:
    async def body(made: World) -> None:
        kept = []
        async with two(made, lambda batch, link: kept.append(batch.image[100:200])) as (sender, _, link):
            for _ in range(2):
                receipt = await link.send_work(Batch("a", pattern(MIB)))
                await receipt.result(20.0)
            assert sender.bulk.store.statistics()["leases"] == 2
            for view in kept:
                np.testing.assert_array_equal(view, pattern(MIB)[100:200])
            del view
            kept.clear()
            await emptied(sender)

    world(body)


def test_what_a_handler_answers_goes_by_reference_and_is_given_back_when_dropped(world: Any) -> None:
    async def body(made: World) -> None:
        for kind in ("inline", "async"):
            sender, receiver = made.bus("rollout-0"), made.bus("policy-0")

            async def handler(ask: Ask, link: Any) -> Batch:
                return Batch("answer", pattern(ask.size))

            receiver.serve(Ask, handler if kind == "async" else lambda ask, link: Batch("answer", pattern(ask.size)))
            address = await receiver.start()
            await sender.start()
            link = await sender.connect(address, role="policy")
            answer = await link.call(Ask(MIB), deadline_s=20.0)
            np.testing.assert_array_equal(answer.image, pattern(MIB))
            assert receiver.bulk.store.statistics()["leases"] == 1
            del answer
            await emptied(receiver)
            await made.close()

    world(body)


def test_producer_controller_consumer_and_nothing_is_left(world: Any) -> None:
    async def body(made: World) -> None:
        producer, controller = made.bus("rollout-0"), made.bus("controller-0", resolve_bulk=False)
        consumer, sums = made.bus("policy-0"), []
        producer.serve(Ask, lambda ask, link: Batch("answer", pattern(ask.size)))
        consumer.serve(Batch, lambda batch, link: sums.append(int(batch.image.sum())))
        addresses = [await producer.start(), await consumer.start()]
        await controller.start()
        to_producer = await controller.connect(addresses[0], role="rollout")
        to_consumer = await controller.connect(addresses[1], role="policy")

        batch = await to_producer.call(Ask(MIB), deadline_s=20.0)
        assert isinstance(batch.image, BulkRef) and batch.image.owner == "rollout-0"
        receipt = await to_consumer.send_work(Batch("passed on", batch.image))
        await controller.release(batch)
        await controller.release(batch)
        await receipt.result(20.0)
        assert sums == [int(pattern(MIB).sum())]
        assert controller.bulk.store.statistics()["puts"] == 0
        assert consumer.bulk.reader.statistics()["view_bytes"] == MIB
        await emptied(producer)
        with pytest.raises(BulkGone, match="given back before it was sent on"):
            await to_consumer.send_work(Batch("too late", batch.image))

    world(body)


def test_a_reference_that_the_controller_drops_is_given_back_without_release(world: Any) -> None:
    async def body(made: World) -> None:
        async with two(made, lambda batch, link: None, resolve_bulk=False) as (sender, _, link):
            await (await link.send_work(Batch("a", pattern(MIB)))).result(20.0)
            await emptied(sender)

    world(body)


def test_an_answer_that_two_calls_of_one_key_share_outlives_the_first(world: Any) -> None:
    async def body(made: World) -> None:
        sender, receiver, runs = made.bus("rollout-0"), made.bus("policy-0"), []
        receiver.serve(Ask, lambda ask, link: (runs.append(1), Batch("answer", pattern(ask.size)))[1])
        address = await receiver.start()
        await sender.start()
        link = await sender.connect(address, role="policy")
        first, second = await asyncio.gather(*(link.call(Ask(MIB), deadline_s=20.0, key="k") for _ in range(2)))
        assert len(runs) == 1
        del first
        gc.collect(0)
        await asyncio.sleep(0.05)
        np.testing.assert_array_equal(second.image, pattern(MIB))
        del second
        await emptied(receiver)
        with pytest.raises(RemoteError, match="BulkGone"):
            await link.call(Ask(MIB), deadline_s=20.0, key="k")

    world(body)


def test_a_send_over_the_budget_waits_for_the_consumer_and_names_the_setting_when_it_does_not_come(world: Any) -> None:
    async def body(made: World) -> None:
        kept = []
        async with two(made, lambda batch, link: kept.append(batch)) as (sender, _, link):
            for _ in range(2):
                await (await link.send_work(Batch("a", pattern(4 * MIB)))).result(20.0)
            with pytest.raises(DeadlineExceeded, match="most by policy-0.*`bulk.budget_bytes`"):
                await link.send_work(Batch("b", pattern(MIB)), deadline_s=0.05)
            waiting = asyncio.ensure_future(link.send_work(Batch("c", pattern(MIB))))
            await asyncio.sleep(0)
            kept.clear()
            await (await waiting).result(20.0)
            kept.clear()
            await emptied(sender)

    world(body)


def test_a_lost_peer_gives_its_budget_back_and_what_it_lent_stays_readable(world: Any) -> None:
    async def body(made: World) -> None:
        kept = []
        async with two(made, lambda batch, link: kept.append(batch)) as (sender, receiver, link):
            receipt = await link.send_work(Batch("a", pattern(MIB)))
            await receipt.result(20.0)
            sender.forget("policy-0", receiver.identity.incarnation, "killed by SIGKILL")
            await emptied(sender)
            receiver.forget("rollout-0", sender.identity.incarnation, "killed by SIGKILL")
            assert receiver.bulk.statistics()["loans"]["orphaned"] == 1
            with pytest.raises(PeerLost):
                await link.send_work(Batch("b", pattern(MIB)))
            assert sender.bulk.store.statistics()["leases"] == 0
            kept.clear()

    world(body)


def test_many_small_arrays_that_are_too_much_for_one_message_go_by_reference_too(world: Any) -> None:
    @schema("bulk_test_many", version=1)
    class Many:
        batches: List[Batch]

    async def body(made: World) -> None:
        sender, receiver, seen = made.bus("rollout-0"), made.bus("policy-0"), []
        receiver.serve(Many, lambda many, link: seen.append([int(batch.image.sum()) for batch in many.batches]))
        address = await receiver.start()
        await sender.start()
        link = await sender.connect(address, role="policy")
        parts = [pattern(48 * KIB + n) for n in range(30)]
        await (await link.send_work(Many([Batch(str(n), part) for n, part in enumerate(parts)]))).result(20.0)
        assert seen == [[int(part.sum()) for part in parts]]
        assert 0 < sender.bulk.store.statistics()["puts"] < 30
        await emptied(sender)
        with pytest.raises(MessageTooLarge):
            await link.send_work(Batch("x" * 2 * MIB, parts[0]))

    world(body)


def test_an_array_that_cannot_be_fetched_is_the_senders_error_and_costs_nothing_else(world: Any) -> None:
    async def body(made: World) -> None:
        async with two(made, lambda batch, link: None) as (sender, receiver, link):
            fetch = receiver.bulk.reader.fetch

            async def gone(ref: BulkRef, **options: Any) -> Any:
                raise BulkGone("the lease ended")

            receiver.bulk.reader.fetch = gone
            with pytest.raises(RemoteError, match="BulkGone: the lease ended"):
                await link.call(Batch("a", pattern(MIB)), deadline_s=20.0)
            receiver.bulk.reader.fetch = fetch
            await emptied(sender)
            await link.call(Batch("a", pattern(MIB)), deadline_s=20.0)

    world(body)
