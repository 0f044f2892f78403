"""What is under way at whom, and what is held of whom, on both transports."""

from __future__ import annotations

import asyncio

from cosmos_actor.bus.waits import held, schema_of, under_way
from tests.bus.messages import Number
from tests.bus.world import World


def test_work_and_calls_are_named_until_they_are_done(world: World) -> None:
    async def scenario(world: World) -> None:
        gate = asyncio.Event()

        async def wait(message: Number, link: object) -> None:
            await gate.wait()

        sender, receiver, link = await world.pair(prepare=lambda bus: bus.serve(Number, wait, concurrency=4))
        receipts = [await link.send_work(Number(number)) for number in range(3)]
        while held(receiver) != {sender.identity.actor: 3}:
            await asyncio.sleep(0.001)
        [entry] = under_way(sender)
        assert (entry["on"], entry["channel"], entry["message"], entry["count"], entry["up"]) == (
            receiver.identity.actor, "work", "test.number", 3, True)
        assert entry["for_s"] >= 0 and under_way(receiver) == []
        gate.set()
        for receipt in receipts:
            await receipt.result(5.0)
        assert under_way(sender) == [] and held(receiver) == {}

    world.run(scenario)


def test_the_name_is_read_from_the_beginning_of_a_message_of_any_size(memory_world: World) -> None:
    async def scenario(world: World) -> None:
        _, _, link = await world.pair()
        assert schema_of(link.out.pack(Number(1, "x" * 100_000), None).body) == "test.number"

    memory_world.run(scenario)
