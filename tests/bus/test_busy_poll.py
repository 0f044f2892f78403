"""Awake for the next message, not for ever: what it is for is measured by benchmarks/bus.py."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cosmos_actor.bus import Bus, Limits, busy_poll
from cosmos_actor.bus.busy_poll import BusyPoll
from tests.bus.messages import Number
from tests.bus.world import World


async def over(poll: BusyPoll) -> None:
    ends = time.monotonic() + 5
    while poll._turning:
        assert time.monotonic() < ends, "it turns for ever"
        await asyncio.sleep(0)


def test_it_ends_by_itself_and_then_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(busy_poll, "PAUSE_FIRST_S", 60.0)
        poll = BusyPoll(0.02)
        poll.begin()
        assert poll._turning
        await over(poll)
        poll.begin()
        assert not poll._turning, "nothing was heard: it pauses"

    asyncio.run(scenario())


def test_what_is_heard_keeps_it_willing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(busy_poll, "CONTENDED_S", 60.0)  # other processes of this machine must not end it
        poll = BusyPoll(0.02)
        poll.begin()
        poll.heard()
        await over(poll)
        poll.begin()
        assert poll._turning

    asyncio.run(scenario())


def test_zero_sleeps_as_ever() -> None:
    async def scenario() -> None:
        poll = BusyPoll(0.0)
        poll.begin()
        assert not poll._turning
        looks = iter(range(10**9))
        assert not poll.spin(lambda: next(looks) < 0, 60.0) and next(looks) == 1

    asyncio.run(scenario())


def test_other_tasks_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(busy_poll, "CONTENDED_S", 60.0)  # other processes of this machine must not end it
        poll = BusyPoll(5.0)
        poll.begin()
        for _ in range(50):
            await asyncio.sleep(0)
        assert poll._turning

    asyncio.run(scenario())


def test_only_calls_to_a_process_of_the_host_keep_it_awake(zmq_world: World) -> None:
    def served(bus: Bus) -> None:
        bus.serve(Number, lambda message, link: Number(message.value + 1))

    async def scenario(world: World) -> None:
        begun: list[str] = []
        near, far, link = await world.pair(prepare=served)
        for bus in (near, far):
            bus.busy_poll.begin = lambda name=bus.identity.actor: begun.append(name)  # type: ignore[method-assign,misc]
        await (await link.send_work(Number(1))).result(5)
        assert begun == []
        await link.call(Number(1), deadline_s=5)
        assert sorted(begun) == ["controller-0", "rollout-0"]

    zmq_world.run(scenario)


def test_over_the_socket_alone_nobody_stays_awake(zmq_world: World) -> None:
    async def scenario(world: World) -> None:
        def served(bus: Any) -> None:
            bus.serve(Number, lambda message, link: None)

        near, _, link = await world.pair(prepare=served, limits=Limits(shared_bytes=0))
        await link.call(Number(1), deadline_s=5)
        assert not near.busy_poll._turning

    zmq_world.run(scenario)


def test_a_spin_sees_what_comes_and_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_poll, "PAUSE_FIRST_S", 60.0)
    monkeypatch.setattr(busy_poll, "CONTENDED_S", 60.0)
    looks = iter(range(10**9))
    poll = BusyPoll(5.0)
    assert poll.spin(lambda: next(looks) > 1000)
    poll = BusyPoll(0.01)
    assert not poll.spin(lambda: False)
    begun = next(looks)
    assert not poll.spin(lambda: next(looks) < 0)
    assert next(looks) == begun + 2, "nothing came: it looks once and pauses"
    assert poll.spin(lambda: True)


def test_a_processor_that_comes_back_late_with_the_answer_was_with_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_poll, "CONTENDED_S", 0.0)
    looks = iter(range(10**9))
    poll = BusyPoll(60.0)
    assert poll.spin(lambda: next(looks) > busy_poll.LOOKS)
    assert poll._not_before == 0.0


def test_a_spin_ends_where_others_want_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_poll, "CONTENDED_S", 0.0)
    looks = iter(range(10**9))
    poll = BusyPoll(60.0)
    assert not poll.spin(lambda: next(looks) < 0)
    assert next(looks) <= busy_poll.LOOKS + 3
    monkeypatch.setattr(busy_poll.time, "monotonic", lambda: now)
    pauses = []
    for _ in range(9):
        now = poll._not_before
        assert not poll.spin(lambda: False)
        pauses.append(round(poll._not_before - now, 3))
    assert pauses == [0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.5, 0.5]
    now += 10.0
    assert not poll.spin(lambda: False) and round(poll._not_before - now, 3) == 0.002, "it was calm meanwhile"
