"""Fragments are of steps that were made, whatever simulators do; episodes and errors are each counted once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from cosmos_actor.roles.collector import SimulatorsFail
from tests.roles.yard import Count, Yard, check, length_of, tasks


def run(scene: Any) -> None:
    asyncio.run(asyncio.wait_for(scene, 30.0))


async def collect(yard: Yard, count: int, steps: int = 8) -> list[dict[str, Any]]:
    found = await yard.collector.collect(tasks(count, steps))
    for item in found:
        check(item, steps)
    return found


def episodes(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [episode for item in found for episode in item["episodes"]]


def test_fragments_follow_each_other_and_every_episode_is_reported_once() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        await yard.attach("simulator-0", envs=3)
        found = [await collect(yard, 3) for _ in range(4)]
        reported = [episode for part in found for episode in episodes(part)]
        assert len({episode["unit"] for episode in reported}) == len(reported) == yard.leases.statistics()["done"]
        for episode in reported:
            length = length_of(episode["seed"])
            assert (episode["length"], episode["return"]) == (length, length * (length + 1) / 2)
            assert episode["terminated"] is (episode["seed"] % 2 == 0)
        for first, second in zip(found[0], found[1], strict=True):  # the slot goes on where it was
            last = first["columns"]
            if not (last["terminated"][-1] or last["truncated"][-1]):
                assert second["columns"]["observations"]["state"][0].tolist() == last["after"]["state"][-1].tolist()
        assert all((item["columns"]["versions"] == 7).all() for part in found for item in part)

    run(scene())


def test_more_fragments_than_slots_are_made_one_after_another() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        await yard.attach("simulator-0", envs=2)
        assert len(await collect(yard, 5)) == 5

    run(scene())


def test_simulators_share_the_work_and_their_questions_are_one_batch() -> None:
    async def scene() -> None:
        yard = await Yard(max_wait_s=5.0).open()
        for name in ("simulator-0", "simulator-1"):
            await yard.attach(name, envs=2)
        found = await collect(yard, 4)
        assert Counter(item["actor"] for item in found) == {"simulator-0": 2, "simulator-1": 2}
        assert yard.rows == [4] * 8

    run(scene())


def test_it_waits_for_a_simulator_and_uses_one_that_comes_late() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        waiting = asyncio.ensure_future(collect(yard, 2))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await yard.attach("simulator-0")
        assert len(await waiting) == 2

    run(scene())


class Raises(Count):
    """Raises in the given step, of the first attempts only."""

    def __init__(self, at: int, attempts: int = 1) -> None:
        super().__init__()
        self.raise_at, self.attempts = at, attempts

    def reset(self, unit: Any) -> None:
        super().reset(unit)
        self.attempt = unit.attempt

    def step(self, action: Any) -> Any:
        if self.attempt < self.attempts and self.at + 1 == self.raise_at:
            raise RuntimeError("the gripper is stuck")
        return super().step(action)


def test_a_slot_that_raises_costs_its_own_fragment_only_and_its_unit_is_tried_again() -> None:
    async def scene() -> None:
        yard = await Yard(most_given_up=0).open()
        made = iter([Raises(2), *(Count() for _ in range(9))])
        await yard.attach("simulator-0", envs=3, make=lambda: next(made))
        found = await collect(yard, 3)
        [failure] = yard.told
        assert failure["kind"] == "step" and failure["again"] and "the gripper is stuck" in failure["text"]
        assert "simulator-0" in failure["simulator"]
        seeds = [episode["seed"] for episode in episodes(found)]
        assert len(set(seeds)) == len(seeds)
        counts = yard.leases.statistics()
        assert counts["failures"] == {"step": 1} and counts["given_up"] == 0

    run(scene())


def test_a_simulator_that_always_fails_ends_the_request_and_says_how_often() -> None:
    async def scene() -> None:
        yard = await Yard(attempts=2, most_given_up=2).open()
        await yard.attach("simulator-0", make=lambda: Raises(1, attempts=99))
        with pytest.raises(SimulatorsFail, match=r"work units were given up, after \d+ x step.*sim.most_given_up"):
            await yard.collector.collect(tasks(2))

    run(scene())


class Breaks(Count):
    """Gives a NaN once, a wrong shape once."""

    seen = 0

    def observe(self) -> Any:
        Breaks.seen += 1
        if Breaks.seen == 5:
            return {"state": np.array([np.nan, 0.0], np.float32)}
        if Breaks.seen == 11:
            return {"state": np.zeros(3, np.float32)}
        return super().observe()


def test_what_is_not_as_described_is_never_trained_on() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        await yard.attach("simulator-0", make=Breaks)
        await collect(yard, 4)
        assert sorted(failure["kind"] for failure in yard.told) == ["not_finite", "shape"]

    run(scene())


def test_a_simulator_that_dies_is_replaced_by_another_and_nothing_counts_twice() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        first = await yard.attach("simulator-0", envs=2)
        await collect(yard, 2)
        first.answering.clear()
        working = asyncio.ensure_future(collect(yard, 2))
        await asyncio.sleep(0.05)
        await first.die()
        await yard.attach("simulator-1", envs=2)
        found = await working
        assert {item["actor"] for item in found} == {"simulator-1"}
        assert {failure["kind"] for failure in yard.told} == {"lost"}
        assert {episode["attempt"] for episode in episodes(found)} >= {1}
        units = [episode["unit"] for episode in episodes(found)]
        assert len(set(units)) == len(units)

    run(scene())


def test_one_that_is_cut_off_and_back_goes_on_where_it_was() -> None:
    async def scene() -> None:
        yard = await Yard(resume_s=10.0).open()
        simulator = await yard.attach("simulator-0", envs=2)
        working = asyncio.ensure_future(collect(yard, 2, steps=400))
        await asyncio.sleep(0.05)
        yard.bus.forget("simulator-0", simulator.bus.identity.incarnation, "the network is gone")
        await asyncio.sleep(0.05)
        await simulator.attach()
        assert simulator.resumed
        await working
        assert yard.told == [] and yard.gateway.statistics()["resumed"] == 1

    run(scene())


def test_one_that_hangs_is_not_waited_for_longer_than_its_deadline() -> None:
    async def scene() -> None:
        yard = await Yard(step_s=0.1).open()
        hanging = await yard.attach("simulator-0", envs=2)
        hanging.answering.clear()
        working = asyncio.ensure_future(collect(yard, 2))
        await yard.attach("simulator-1", envs=2)
        found = await working
        assert {item["actor"] for item in found} == {"simulator-1"}
        assert yard.told and all(failure["kind"] == "hang" for failure in yard.told)
        assert [simulator.name for simulator in yard.gateway.present] == ["simulator-1"]

    run(scene())


def test_one_that_leaves_in_the_middle_is_no_loss() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        leaving = await yard.attach("simulator-0", envs=2)
        working = asyncio.ensure_future(collect(yard, 4, steps=200))
        await asyncio.sleep(0.05)
        await leaving.leave()
        await yard.attach("simulator-1", envs=2)
        assert {item["actor"] for item in await working} == {"simulator-1"}
        assert yard.told == [] and yard.leases.statistics()["failures"] == {}

    run(scene())


def test_a_request_that_is_given_up_leaves_no_slot_in_the_middle_of_an_episode() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        slow = await yard.attach("simulator-0", envs=2)
        working = asyncio.ensure_future(yard.collector.collect(tasks(2, steps=400)))
        await asyncio.sleep(0.05)
        slow.answering.clear()  # it is in the middle of a step
        await asyncio.sleep(0.05)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        slow.answering.set()
        found = await collect(yard, 2)
        assert yard.told == [] and yard.leases.statistics()["failures"] == {}
        units = [episode["unit"] for episode in episodes(found)]
        assert len(set(units)) == len(units) == yard.leases.statistics()["done"]

    run(scene())


@pytest.mark.parametrize("turns", range(4))
def test_one_that_is_given_up_just_when_something_changes_ends_and_leaves_nothing_running(turns: int) -> None:
    async def scene() -> None:
        yard = await Yard(step_s=60.0).open()
        for name in ("simulator-0", "simulator-1"):
            (await yard.attach(name)).answering.clear()
        collecting = asyncio.ensure_future(yard.collector.collect(tasks(4)))
        await asyncio.sleep(0.05)
        first, second = yard.gateway.present
        assert (first.doing, second.doing) == ("reset", "reset")
        yard.gateway.dismiss(first, "a change")
        for _ in range(turns):
            await asyncio.sleep(0)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(collecting, 5.0)
        assert (first.doing, second.doing) == ("", "") and yard.leases.statistics()["leased"] == 0

    run(scene())


def test_where_there_was_no_answer_to_what_is_seen_episodes_begin_anew() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        await yard.attach("simulator-0", envs=1)
        before, act = await collect(yard, 1, steps=2), yard.acting._act
        answers = iter([act, act])

        async def ends(*question: Any) -> Any:
            answer = next(answers, None)
            if answer is None:
                raise ZeroDivisionError
            return await answer(*question)

        yard.acting._act = ends
        with pytest.raises(ZeroDivisionError):
            await collect(yard, 1)
        yard.acting._act = act
        units = [episode["unit"] for episode in episodes(before + await collect(yard, 1) + await collect(yard, 1))]
        assert len(set(units)) == len(units)

    run(scene())


def test_who_is_idle_in_the_middle_of_an_episode_while_a_request_goes_on_is_not_taken_for_stuck() -> None:
    async def scene() -> None:
        yard = await Yard(lease_s=0.2, step_s=60.0).open()
        slow = await yard.attach("simulator-0", envs=1)
        await yard.attach("simulator-1", envs=2)
        slow.answering.clear()
        collecting = asyncio.ensure_future(collect(yard, 2))
        while [one.name for one in yard.gateway.present] != ["simulator-1"]:  # the slow one is given up
            await asyncio.sleep(0.05)
        for item in await collecting:
            assert item["actor"] == "simulator-1"
        assert [failure["simulator"] for failure in yard.told] == ["simulator-0 (test:count)"]

    run(scene())


def test_a_work_unit_that_nobody_gets_on_with_is_given_to_another() -> None:
    async def scene() -> None:
        yard = await Yard(lease_s=0.2, step_s=60.0).open()
        stuck = await yard.attach("simulator-0", envs=2)
        stuck.answering.clear()
        working = asyncio.ensure_future(collect(yard, 2))
        await asyncio.sleep(0.05)
        await yard.attach("simulator-1", envs=2)
        assert {item["actor"] for item in await working} == {"simulator-1"}
        assert {failure["kind"] for failure in yard.told} == {"lost"}
        assert "it has not got on with a work unit" in yard.told[0]["text"]

    run(scene())
