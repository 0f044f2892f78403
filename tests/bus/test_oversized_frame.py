"""A frame above what a receiver lets in costs the wire that it came on: its link goes on, and so do the neighbours'."""

from __future__ import annotations

import asyncio
from typing import List

import pytest

from cosmos_actor.bus import Limits
from tests.bus.messages import Number
from tests.bus.world import World, eventually

SMALL = Limits(max_message_bytes=4096, batch_bytes=4096)


@pytest.mark.parametrize("frames", [1, 2], ids=["alone", "behind a small one"])
def test_an_oversized_frame_ends_one_wire_and_no_link(zmq_world: World, frames: int) -> None:
    async def scenario(world: World) -> None:
        seen: List[int] = []
        near, far, link = await world.pair(prepare=lambda bus: bus.serve(Number, lambda number, _: seen.append(
            number.value)), limits=SMALL)
        neighbour = world.bus("policy")
        await neighbour.start(None)
        beside = await neighbour.connect(far.address, role="rollout", deadline_s=10)
        receipts = [await link.send_work(Number(value)) for value in range(50)]
        await asyncio.sleep(0)
        link.wire.send([b"small", bytes(SMALL.max_frame_bytes + 1)][-frames:])
        receipts += [await link.send_work(Number(value)) for value in range(50, 100)]
        others = [await beside.send_work(Number(1000 + value)) for value in range(100)]
        for receipt in (*receipts, *others):
            await receipt.result(20)
        await eventually(lambda: link.wires_used == 2, "a new wire", 10)
        await (await link.send_work(Number(100))).result(20)
        assert [value for value in seen if value < 1000] == list(range(101)), "nothing lost, nothing twice, in order"
        assert [value for value in seen if value >= 1000] == list(range(1000, 1100))
        assert beside.wires_used == 1 and link.lost is None and set(far.links) == {"controller-0", "policy-0"}

    zmq_world.run(scenario)
