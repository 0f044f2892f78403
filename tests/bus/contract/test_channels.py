"""What each of the four channels promises."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cosmos_actor.bus import Bus, BusError, DeadlineExceeded, Limits, RemoteError, WouldBlock
from tests.bus.messages import Fail, Number, Observation
from tests.bus.world import NO_TIMER, FakeClock, Meddler, World, eventually


def doubling(bus: Bus) -> None:
    def fail(message: Fail, link: Any) -> None:
        raise ValueError(message.text)

    bus.serve(Number, lambda message, link: Number(2 * message.value, message.text))
    bus.serve(Fail, fail)


def test_work_is_done_after_its_handler_and_carries_the_answer(world: World) -> None:
    async def scenario(world: World) -> None:
        _, _, link = await world.pair(prepare=doubling)
        receipts = [await link.send_work(Number(value)) for value in range(300)]
        answers = [(await receipt.result(5)).value for receipt in receipts]
        assert answers == [2 * value for value in range(300)]

    world.run(scenario)


def test_work_without_an_answer_is_done_with_none(world: World) -> None:
    async def scenario(world: World) -> None:
        seen: list[int] = []
        _, _, link = await world.pair(prepare=lambda bus: bus.serve(Number, lambda m, _: seen.append(m.value)))
        receipts = [await link.send_work(Number(value)) for value in range(500)]
        assert [await receipt.result(5) for receipt in receipts] == [None] * 500
        assert seen == list(range(500))

    world.run(scenario)


def test_work_is_not_done_before_the_handler_returned(world: World) -> None:
    async def scenario(world: World) -> None:
        gate = asyncio.Event()

        async def slow(message: Number, link: Any) -> None:
            await gate.wait()

        _, _, link = await world.pair(prepare=lambda bus: bus.serve(Number, slow))
        receipt = await link.send_work(Number(1))
        with pytest.raises(DeadlineExceeded) as caught:
            await receipt.result(0.05)
        assert "rollout-0/" in str(caught.value) and "work/1" in str(caught.value) and "sent" in str(caught.value)
        gate.set()
        assert await receipt.result(5) is None

    world.run(scenario)


def test_a_handler_that_raises_is_the_senders_remote_error(world: World) -> None:
    async def scenario(world: World) -> None:
        _, _, link = await world.pair(prepare=doubling)
        receipt = await link.send_work(Fail("no such prompt"))
        with pytest.raises(RemoteError, match="ValueError: no such prompt") as caught:
            await receipt.result(5)
        assert caught.value.kind == "ValueError"
        with pytest.raises(RemoteError, match="no such prompt"):
            await link.call(Fail("no such prompt"), deadline_s=5)

    world.run(scenario)


@pytest.mark.parametrize("waits", [False, True])
def test_an_error_that_is_none_of_exception_is_an_answer_too(world: World, waits: bool) -> None:
    """Libraries have such errors (torch's CheckpointException, the panics of Rust). Without an answer it is a hang."""
    class LibraryPanic(BaseException):
        pass

    def fail(message: Fail, link: Any) -> None:
        raise LibraryPanic(message.text)

    async def fail_later(message: Fail, link: Any) -> None:
        await asyncio.sleep(0)
        fail(message, link)

    async def scenario(world: World) -> None:
        _, _, link = await world.pair(prepare=lambda bus: bus.serve(Fail, fail_later if waits else fail))
        receipt = await link.send_work(Fail("no room"))
        with pytest.raises(RemoteError, match="LibraryPanic: no room"):
            await receipt.result(5)
        with pytest.raises(RemoteError, match="LibraryPanic: no room"):
            await link.call(Fail("no room"), deadline_s=5)

    world.run(scenario)


def test_work_that_nobody_serves_is_answered_so(world: World) -> None:
    async def scenario(world: World) -> None:
        _, _, link = await world.pair()
        with pytest.raises(RemoteError, match="nobody serves test.number"):
            await link.call(Number(1), deadline_s=5)

    world.run(scenario)


def test_a_call_returns_the_answer_and_arrays_survive(world: World) -> None:
    async def scenario(world: World) -> None:
        _, _, link = await world.pair(prepare=lambda bus: bus.serve(Observation, lambda message, _: message))
        image = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
        back = await link.call(Observation("e", image, np.linspace(0, 1, 7), note={"k": [1, None]}), deadline_s=5)
        assert np.array_equal(back.image, image) and back.joints.dtype == np.float64 and back.limits is None
        assert back.note == {"k": [1, None]} and not back.image.flags.writeable

    world.run(scenario)


def test_both_ends_can_call(world: World) -> None:
    async def scenario(world: World) -> None:
        near, far, _ = await world.pair()
        near.serve(Number, lambda message, _: Number(message.value + 1))
        assert (await far.links["controller-0"].call(Number(41), deadline_s=5)).value == 42

    world.run(scenario)


def test_a_repeated_key_gets_the_first_answer(world: World) -> None:
    async def scenario(world: World) -> None:
        runs: list[int] = []
        gate = asyncio.Event()

        async def once(message: Number, link: Any) -> Number:
            runs.append(message.value)
            await gate.wait()
            return Number(len(runs))

        _, _, link = await world.pair(prepare=lambda bus: bus.serve(Number, once, concurrency=4))
        first = asyncio.ensure_future(link.call(Number(7), deadline_s=5, key="k"))
        second = asyncio.ensure_future(link.call(Number(7), deadline_s=5, key="k"))
        await eventually(lambda: runs, "the handler runs")
        gate.set()
        assert (await first).value == (await second).value == 1
        assert (await link.call(Number(7), deadline_s=5, key="k")).value == 1
        assert (await link.call(Number(7), deadline_s=5, key="other")).value == 2

    world.run(scenario)


def test_the_latest_state_wins_and_skipped_values_are_counted(world: World) -> None:
    async def scenario(world: World) -> None:
        gate, seen = asyncio.Event(), []

        async def watch(message: Number, link: Any) -> None:
            seen.append(message.value)
            await gate.wait()

        near, far, link = await world.pair(prepare=lambda bus: bus.serve_state("version", watch))
        near.publish_state("version", Number(0))
        await eventually(lambda: seen == [0], "first value")
        for value in range(1, 101):
            near.publish_state("version", Number(value))
        gate.set()
        await eventually(lambda: seen[-1] == 100, "last value")
        assert seen == [0, 100]
        assert link.out.latest.skipped == 99
        assert far.links["controller-0"].incoming.latest.skipped == 99
        assert far.links["controller-0"].states["version"].value == 100

    world.run(scenario)


def test_a_late_joiner_gets_the_latest_state_at_once(world: World) -> None:
    async def scenario(world: World) -> None:
        near, far = world.bus("controller"), world.bus("rollout")
        seen: list[int] = []
        far.serve_state("version", lambda message, link: seen.append(message.value))
        address = await far.start(world.anywhere)
        await near.start(world.anywhere)
        near.publish_state("version", Number(3))
        near.publish_state("version", Number(4))
        await near.connect(address, role="rollout")
        await eventually(lambda: seen == [4], "the latest value")

    world.run(scenario)


def test_events_come_in_order_one_at_a_time(world: World) -> None:
    async def scenario(world: World) -> None:
        seen: list[int] = []
        running: list[int] = []

        async def watch(message: Number, link: Any) -> None:
            running.append(message.value)
            assert len(running) == 1
            await asyncio.sleep(0)
            seen.append(running.pop())

        _, _, link = await world.pair(prepare=lambda bus: bus.serve_event(Number, watch))
        for value in range(200):
            await link.emit(Number(value))
        await eventually(lambda: len(seen) == 200, "all events")
        assert seen == list(range(200))

    world.run(scenario)


def test_concurrency_bounds_the_handlers_of_a_type(world: World) -> None:
    async def scenario(world: World) -> None:
        now, most = [0], [0]

        async def work(message: Number, link: Any) -> None:
            now[0] += 1
            most[0] = max(most[0], now[0])
            await asyncio.sleep(0)
            now[0] -= 1

        _, _, link = await world.pair(prepare=lambda bus: bus.serve(Number, work, concurrency=3))
        for receipt in [await link.send_work(Number(value)) for value in range(50)]:
            await receipt.result(5)
        assert most[0] == 3

    world.run(scenario)


def test_sync_handlers_run_in_the_executor_when_there_is_one(world: World) -> None:
    async def scenario(world: World) -> None:
        import threading

        main = threading.get_ident()
        with ThreadPoolExecutor(1) as pool:
            def where(message: Number, link: Any) -> Number:
                return Number(int(threading.get_ident() == main))

            _, _, link = await world.pair(prepare=lambda bus: bus.serve(Number, where), executor=pool)
            assert (await link.call(Number(0), deadline_s=5)).value == 0

    world.run(scenario)


def test_send_waits_for_credit_and_names_the_oldest_message(world: World) -> None:
    async def scenario(world: World) -> None:
        gate = asyncio.Event()

        async def slow(message: Number, link: Any) -> None:
            await gate.wait()

        limits = Limits(work_window_messages=4)
        _, far, link = await world.pair(prepare=lambda bus: bus.serve(Number, slow), limits=limits)
        receipts = [await link.send_work(Number(value)) for value in range(4)]
        with pytest.raises(WouldBlock):
            await link.send_work(Number(4), deadline_s=0)
        with pytest.raises(DeadlineExceeded, match="oldest message is not done") as caught:
            await link.send_work(Number(4), deadline_s=0.05)
        assert caught.value.message_id == "work/1" and caught.value.setting == "bus.work_window_messages"
        waiting = asyncio.ensure_future(link.send_work(Number(5)))
        await asyncio.sleep(0)
        gate.set()
        for receipt in [*receipts, await waiting]:
            await receipt.result(5)
        assert far.links["controller-0"].incoming.inboxes[0].expected == 6

    world.run(scenario)


def test_credit_counts_bytes_too(world: World) -> None:
    async def scenario(world: World) -> None:
        gate = asyncio.Event()

        async def slow(message: Number, link: Any) -> None:
            await gate.wait()

        limits = Limits(work_window_bytes=10_000, max_message_bytes=10_000)
        _, _, link = await world.pair(prepare=lambda bus: bus.serve(Number, slow), limits=limits)
        await link.send_work(Number(1, "x" * 6000))
        with pytest.raises(WouldBlock):
            await link.send_work(Number(2, "x" * 6000), deadline_s=0)
        small = await link.send_work(Number(3), deadline_s=0)
        gate.set()
        await small.result(5)

    world.run(scenario)


def test_a_cancelled_wait_gives_its_credit_on(world: World) -> None:
    async def scenario(world: World) -> None:
        gate = asyncio.Event()

        async def slow(message: Number, link: Any) -> None:
            await gate.wait()

        _, _, link = await world.pair(
            prepare=lambda bus: bus.serve(Number, slow), limits=Limits(work_window_messages=1)
        )
        await link.send_work(Number(0))
        cancelled = asyncio.ensure_future(link.send_work(Number(1)))
        kept = asyncio.ensure_future(link.send_work(Number(2)))
        await asyncio.sleep(0)
        cancelled.cancel()
        gate.set()
        await (await kept).result(5)
        assert link.out.credits[0].used_messages == 0

    world.run(scenario)


def test_an_error_names_its_facts_in_one_line() -> None:
    error = BusError("broken\nin two lines", peer="a/1", channel="work", message_id="work/3", setting="bus.x")
    assert str(error) == "broken in two lines (peer a/1, channel work, message work/3, setting `bus.x`)"


def test_a_state_that_was_lost_comes_again_at_a_heartbeat(world: World) -> None:
    async def scenario(world: World) -> None:
        clock = FakeClock()
        near, far, link = await world.pair(limits=NO_TIMER, clock=clock)
        await eventually(lambda: far.links, "linked")
        back = far.links["controller-0"]
        wire = link.out.wire
        Meddler(link, lambda frames: None)
        near.publish_state("progress", Number(1))
        await asyncio.sleep(0.02)
        link.out.wire = wire
        near.publish_state("progress", Number(2))
        await asyncio.sleep(0.02)
        assert back.states == {}, "the first one is under way, for all that its sender knows"
        for _ in range(2):
            clock.advance(1000)
            near.tick()
        await eventually(lambda: back.states.get("progress") == Number(2), "the newest value")

    world.run(scenario)


def test_a_slow_reader_of_state_keeps_one_value_waiting(world: World) -> None:
    async def scenario(world: World) -> None:
        clock, gate, seen = FakeClock(), asyncio.Event(), []

        async def slow(message: Number, link: Any) -> None:
            seen.append(message.value)
            await gate.wait()

        near, far, link = await world.pair(
            prepare=lambda bus: bus.serve_state("progress", slow), limits=NO_TIMER, clock=clock)
        near.publish_state("progress", Number(1))
        await eventually(lambda: seen == [1], "the first value is being handled")
        for value in range(2, 6):
            near.publish_state("progress", Number(value))
            for _ in range(2):  # its sender can not know whether the first one was lost, and repeats itself
                clock.advance(1000)
                near.tick()
                await asyncio.sleep(0.005)
        gate.set()
        await eventually(lambda: seen[-1] == 5 and link.out.latest.unconfirmed == 0, "the newest value")
        assert seen == [1, 5]

    world.run(scenario)


def test_a_call_is_answered_or_late_no_later_than_its_deadline(world: World) -> None:
    async def scenario(world: World) -> None:
        gate = asyncio.Event()

        async def slow(message: Number, link: Any) -> Number:
            await gate.wait()
            return Number(message.value + 1)

        _, _, link = await world.pair(prepare=lambda bus: bus.serve(Number, slow))
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with pytest.raises(DeadlineExceeded, match=r"not done after 0\.\d+ s.*call/1") as caught:
            await link.call(Number(1), deadline_s=0.1, key="once")
        assert loop.time() - begun < 2 and caught.value.channel == "call"
        gate.set()
        assert await link.call(Number(1), deadline_s=5, key="once") == Number(2)

    world.run(scenario)
