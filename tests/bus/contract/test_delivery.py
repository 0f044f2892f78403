"""Nothing that was accepted is lost, and nothing is handled twice, whatever happens to the wires."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest

from cosmos_actor.bus import Bus, DeadlineExceeded, GapError, Limits, LinkClosed, MessageTooLarge, PeerLost
from cosmos_actor.bus.faults import flip_bit
from tests.bus.messages import Number, Observation
from tests.bus.world import NO_TIMER, FakeClock, Meddler, World, eventually


def collecting(seen: list[int]) -> Any:
    def prepare(bus: Bus) -> None:
        bus.serve(Number, lambda message, link: seen.append(message.value))
        bus.serve_event(Number, lambda message, link: seen.append(message.value))

    return prepare


@pytest.mark.parametrize("side", ["dialler", "listener"])
def test_a_cut_wire_loses_nothing_and_repeats_nothing(world: World, side: str) -> None:
    async def scenario(world: World) -> None:
        seen: list[int] = []
        near, far, dialled = await world.pair(prepare=collecting(seen))
        link = dialled
        if side == "listener":
            near.serve(Number, lambda message, _: seen.append(message.value))
            link = far.links["controller-0"]
        receipts = []
        for value in range(400):
            receipts.append(await link.send_work(Number(value)))
            if value % 100 == 50:
                await eventually(lambda: link.up and dialled.up, "a wire that both ends know")
                world.cut(near)
        for receipt in receipts:
            await receipt.result(10)
        assert seen == list(range(400))
        assert link.wires_used >= 3 and link.lost is None

    world.run(scenario)


def test_a_result_lost_with_its_wire_comes_again_without_a_second_run(world: World) -> None:
    async def scenario(world: World) -> None:
        runs: list[int] = []

        def handler(message: Number, link: Any) -> Number:
            runs.append(message.value)
            Meddler(link, lambda frames: None)  # the answer never leaves
            return Number(message.value + 1)

        near, far, link = await world.pair(prepare=lambda bus: bus.serve(Number, handler))
        call = asyncio.ensure_future(link.call(Number(1), deadline_s=10))
        await eventually(lambda: runs, "the handler ran")
        world.cut(near)
        assert (await call).value == 2
        assert runs == [1]

    world.run(scenario)


@pytest.mark.parametrize("side", ["dialler", "listener"])
def test_one_flipped_bit_costs_the_wire_and_nothing_else(world: World, side: str) -> None:
    async def scenario(world: World) -> None:
        seen: list[int] = []
        near, far, link = await world.pair(prepare=collecting(seen))
        sender, receiver = (near, far) if side == "dialler" else (far, near)
        if side == "listener":
            near.serve(Number, lambda message, _: seen.append(message.value))
            link = far.links["controller-0"]
        receipts = []
        for value in range(20):
            choice = random.Random(value)
            Meddler(link, lambda frames, choice=choice: flip_bit(frames, choice.randrange(8 * sum(map(len, frames)))))
            receipts.append(await link.send_work(Number(value)))
            assert await receipts[-1].result(10) is None
        assert seen == list(range(20))
        assert receiver.statistics()["corrupt_frames"] == 20
        assert link.lost is None and sender.links and receiver.links

    world.run(scenario)


def test_a_flipped_bit_in_an_array_is_noticed(world: World) -> None:
    async def scenario(world: World) -> None:
        near, far, link = await world.pair(prepare=lambda bus: bus.serve(Observation, lambda message, _: message))
        sent = Observation("e", np.arange(48_000, dtype=np.uint8).reshape(100, 160, 3), np.zeros(3))
        Meddler(link, lambda frames: flip_bit(frames, 8 * sum(map(len, frames)) - 8 * 20))
        back = await link.call(sent, deadline_s=10)
        assert np.array_equal(back.image, sent.image)
        assert far.statistics()["corrupt_frames"] == 1

    world.run(scenario)


def test_missing_numbers_are_reported_and_asked_for_again(world: World) -> None:
    async def scenario(world: World) -> None:
        seen: list[int] = []
        gaps: list[GapError] = []
        _, far, link = await world.pair(prepare=collecting(seen))
        far.on_gap(lambda link, error: gaps.append(error))
        await (await link.emit(Number(0))).result(5)
        wire = link.out.wire
        Meddler(link, lambda frames: None)
        for value in range(1, 4):
            await link.emit(Number(value))
        link.out.flush()
        link.out.wire = wire
        last = await link.emit(Number(4))
        await last.result(5)
        assert seen == [0, 1, 2, 3, 4]
        assert (gaps[0].first, gaps[0].last) == (2, 4) and gaps[0].channel == "event"
        assert "numbers 2..4 never came" in str(gaps[0])

    world.run(scenario)


def test_a_loss_at_the_end_shows_at_the_next_heartbeat(world: World) -> None:
    async def scenario(world: World) -> None:
        seen: list[int] = []
        clock = FakeClock()
        near, far, link = await world.pair(prepare=collecting(seen), limits=NO_TIMER, clock=clock)
        wire = link.out.wire
        Meddler(link, lambda frames: None)
        receipt = await link.send_work(Number(7))
        link.out.flush()
        link.out.wire = wire
        clock.advance(1000)
        near.tick()
        await receipt.result(5)
        assert seen == [7]

    world.run(scenario)


def test_a_lost_acknowledgement_is_repeated_at_a_heartbeat(world: World) -> None:
    async def scenario(world: World) -> None:
        seen: list[int] = []
        clock = FakeClock()
        near, far, link = await world.pair(prepare=collecting(seen), limits=NO_TIMER, clock=clock)
        back = far.links["controller-0"]
        wire = back.out.wire
        Meddler(back, lambda frames: None)
        receipt = await link.send_work(Number(7))
        await eventually(lambda: seen and not back.out._has_acks, "handled, acknowledgement swallowed")
        back.out.wire = wire
        for _ in range(3):
            clock.advance(1000)
            near.tick()
            await asyncio.sleep(0.02 if world.kind == "zmq" else 0)
            await asyncio.sleep(0)
        await receipt.result(5)
        assert seen == [7]

    world.run(scenario)


def test_silence_is_a_loss_and_receipts_say_so(world: World) -> None:
    async def scenario(world: World) -> None:
        gate = asyncio.Event()

        async def never(message: Number, link: Any) -> None:
            await gate.wait()

        clock = FakeClock()
        near, far, link = await world.pair(
            prepare=lambda bus: bus.serve(Number, never), limits=NO_TIMER, clock=clock
        )
        down: list[str] = []
        near.on_link_down(lambda link, reason: down.append(reason))
        receipt = await link.send_work(Number(1))
        for _ in range(11):
            clock.advance(1000)
            near.tick()
        with pytest.raises(PeerLost, match=r"no frame for 1\d{4}.0 s") as caught:
            await receipt.result(1)
        assert caught.value.message_id == "work/1" and "rollout-0/" in str(caught.value)
        await eventually(lambda: down, "the callback")
        assert "rollout-0" not in near.links
        with pytest.raises(PeerLost):
            await link.send_work(Number(2))
        gate.set()

    world.run(scenario)


def test_a_declared_pause_is_waited_for(world: World) -> None:
    async def scenario(world: World) -> None:
        clock = FakeClock()
        near, far, link = await world.pair(limits=NO_TIMER, clock=clock)
        far.declare_busy("compiling", 50_000)
        await eventually(lambda: link.liveness.busy_label == "compiling", "the declaration arrives")
        for _ in range(55):
            clock.advance(1000)
            near.tick()
        assert link.lost is None
        for _ in range(6):
            clock.advance(1000)
            near.tick()
        assert link.lost is not None and "after its pause for compiling" in link.lost

    world.run(scenario)


def test_forget_ends_a_link_at_once_and_the_incarnation_stays_out(world: World) -> None:
    async def scenario(world: World) -> None:
        near, far, link = await world.pair(prepare=collecting([]))
        far.serve_event(Observation, lambda message, link: None)
        receipt = await link.send_work(Observation("e", np.zeros((1, 1, 3), np.uint8), np.zeros(1)))
        back = far.links["controller-0"]
        far.forget("controller-0", near.identity.incarnation, "killed by SIGKILL")
        assert "controller-0" not in far.links and back.lost == "killed by SIGKILL"
        with pytest.raises(PeerLost, match="stale incarnation|killed by SIGKILL"):
            await receipt.result(5)
        await eventually(lambda: link.lost, "the forgotten one is told")
        assert "killed by SIGKILL" in str(link.lost)

    world.run(scenario)


def test_forget_raises_peer_lost_in_receipts(world: World) -> None:
    async def scenario(world: World) -> None:
        async def never(message: Number, link: Any) -> None:
            await asyncio.Event().wait()

        near, far, link = await world.pair(prepare=lambda bus: bus.serve(Number, never))
        receipt = await link.send_work(Number(1))
        near.forget("rollout-0", "another life", "not this one")
        assert link.lost is None
        near.forget("rollout-0", far.identity.incarnation, "killed by SIGKILL")
        with pytest.raises(PeerLost, match="killed by SIGKILL"):
            await receipt.result(1)

    world.run(scenario)


def test_a_new_incarnation_takes_the_place_of_the_old_one(world: World) -> None:
    async def scenario(world: World) -> None:
        async def never(message: Number, link: Any) -> None:
            await asyncio.Event().wait()

        old, far = world.bus("controller"), world.bus("rollout")
        old.serve(Number, never)
        address = await far.start(world.anywhere)
        await old.start(world.anywhere)
        await old.connect(address, role="rollout")
        await eventually(lambda: "controller-0" in far.links, "linked")
        receipt = await far.links["controller-0"].send_work(Number(1))
        new = world.bus("controller")
        await new.start(world.anywhere)
        await new.connect(address, role="rollout")
        with pytest.raises(PeerLost, match="superseded by incarnation"):
            await receipt.result(5)
        assert far.links["controller-0"].peer.incarnation == new.identity.incarnation
        await eventually(lambda: not old.links, "the old one is refused")

    world.run(scenario)


@pytest.mark.parametrize("side", ["dialler", "listener"])
def test_goodbye_is_a_loss_at_once(world: World, side: str) -> None:
    async def scenario(world: World) -> None:
        async def never(message: Number, link: Any) -> None:
            await asyncio.Event().wait()

        near, far, link = await world.pair(prepare=lambda bus: bus.serve(Number, never))
        near.serve(Number, never)
        stays, leaves, to_leaver = (near, far, link) if side == "listener" else (far, near, far.links["controller-0"])
        receipt = await to_leaver.send_work(Number(1))
        await eventually(lambda: leaves.links[stays.identity.actor].incoming.running, "it runs there")
        report = await leaves.close(0)
        assert report.stopped_handlers == 1 and not leaves.links
        with pytest.raises(PeerLost, match="goodbye: closed"):
            await receipt.result(5)

    world.run(scenario)


def test_close_drains_then_reports_what_is_left(world: World) -> None:
    async def scenario(world: World) -> None:
        gate, seen = asyncio.Event(), []

        async def slow(message: Number, link: Any) -> None:
            if message.value:
                await gate.wait()
            seen.append(message.value)

        near, _, link = await world.pair(prepare=lambda bus: bus.serve(Number, slow))
        quick, stuck = await link.send_work(Number(0)), await link.send_work(Number(1))
        report = await near.close(0.2)
        assert report.undelivered == {"rollout-0": 1} and seen == [0]
        assert await quick.result(1) is None
        with pytest.raises(LinkClosed):
            await stuck.result(1)
        assert await near.close(5) == ({}, 0)

    world.run(scenario)


def test_a_clean_close_leaves_nothing(world: World) -> None:
    async def scenario(world: World) -> None:
        seen: list[int] = []
        near, _, link = await world.pair(prepare=collecting(seen))
        for value in range(100):
            await link.send_work(Number(value))
        assert await near.close(5) == ({}, 0)
        assert seen == list(range(100))

    world.run(scenario)


def test_an_oversized_message_is_refused_at_the_sender(world: World) -> None:
    async def scenario(world: World) -> None:
        seen: list[int] = []
        _, _, link = await world.pair(prepare=collecting(seen))
        with pytest.raises(MessageTooLarge, match="bus.max_message_bytes") as caught:
            await link.send_work(Number(1, "x" * 2_000_000))
        assert "rollout-0/" in str(caught.value)
        await (await link.send_work(Number(2))).result(5)
        assert seen == [2]

    world.run(scenario)


def test_the_receivers_size_counts(world: World) -> None:
    async def scenario(world: World) -> None:
        near, far = world.bus("controller"), world.bus("rollout", limits=Limits(max_message_bytes=1000))
        address = await far.start(world.anywhere)
        await near.start(world.anywhere)
        link = await near.connect(address, role="rollout")
        with pytest.raises(MessageTooLarge, match="takes 1000"):
            await link.send_work(Number(1, "x" * 1000))

    world.run(scenario)


def test_statistics_add_up(world: World) -> None:
    async def scenario(world: World) -> None:
        seen: list[int] = []
        near, far, link = await world.pair(prepare=collecting(seen))
        for value in range(10):
            await (await link.send_work(Number(value))).result(5)
        sending = near.statistics()["links"]["rollout-0"]["sending"]
        receiving = far.statistics()["links"]["controller-0"]["receiving"]
        assert sending["accepted"]["work"] == receiving["channels"]["work"]["received"] == 10
        assert sending["under_way"] == {"work": 0, "call": 0, "event": 0}
        assert sending["credit"]["work"]["used_messages"] == 0

    world.run(scenario)


def test_errors_keep_nothing_alive(world: World) -> None:
    """Whoever was told that its message is lost, late or not accepted holds it no longer, without a collection."""

    async def scenario(world: World) -> None:
        async def never(message: Observation, link: Any) -> None:
            await asyncio.Event().wait()

        near, far, link = await world.pair(
            prepare=lambda bus: bus.serve(Observation, never), limits=Limits(work_window_messages=1))

        async def attempt(kind: type[BaseException]) -> Any:
            image = np.zeros((8, 8, 3), np.uint8)
            try:
                receipt = await link.send_work(Observation("e", image, np.zeros(1)), deadline_s=0.05)
                await receipt.result(0.05)
            except kind:
                await asyncio.sleep(0)  # the loop holds on to the wait until its turn is over
                return weakref.ref(image)
            raise AssertionError(f"no {kind.__name__}")

        first = await attempt(DeadlineExceeded)
        second = await attempt(DeadlineExceeded)
        assert second() is None, "it was not accepted"
        near.forget("rollout-0", far.identity.incarnation, "killed by SIGKILL")
        assert first() is None, "it is lost"
        assert (await attempt(PeerLost))() is None

    gc.disable()
    try:
        world.run(scenario)
    finally:
        gc.enable()
