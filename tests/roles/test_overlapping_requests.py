"""Requests for fragments overlap: none waits for simulators that are idle, and none feels another's end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cosmos_actor.actors.fragment import CollectTask
from tests.roles.test_collector import Raises, collect, episodes, run
from tests.roles.yard import Count, Yard, check, tasks


def named(count: int, name: str) -> list[CollectTask]:
    return [replace(task, group_id=f"{name}-{task.group_id}") for task in tasks(count)]


def test_who_is_idle_while_a_request_comes_to_its_end_begins_with_the_next() -> None:
    async def scene() -> None:
        yard = await Yard(step_s=60.0).open()
        slow = await yard.attach("simulator-0", envs=1)
        await yard.attach("simulator-1", envs=1)
        slow.answering.clear()
        first = asyncio.ensure_future(collect(yard, 2))
        await asyncio.sleep(0)
        later = [named(3, "later"), named(1, "last")]
        second, third = [asyncio.ensure_future(yard.collector.collect(part)) for part in later]
        assert {item["actor"] for item in await second} == {item["actor"] for item in await third} == {"simulator-1"}
        assert not first.done()
        slow.answering.set()
        found = await first + second.result() + third.result()
        for item in found:
            check(item)
        units = [episode["unit"] for episode in episodes(found)]
        assert len(set(units)) == len(units) == yard.leases.statistics()["done"]

    run(scene())


def test_an_earlier_request_is_served_first() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        await yard.attach("simulator-0", envs=2)
        ended = []
        requests = [asyncio.ensure_future(yard.collector.collect(named(4, name))) for name in ("first", "second")]
        for request, name in zip(requests, ("first", "second"), strict=True):
            request.add_done_callback(lambda _, name=name: ended.append(name))
        await asyncio.gather(*requests)
        assert ended == ["first", "second"] and yard.collector.statistics()["acting"]["rows"] == 8 * 8

    run(scene())


def test_a_request_that_is_given_up_leaves_the_next_one_alone() -> None:
    async def scene() -> None:
        yard = await Yard(step_s=60.0).open()
        simulators = [await yard.attach(f"simulator-{at}", envs=2) for at in range(2)]
        simulators[0].answering.clear()
        first = asyncio.ensure_future(yard.collector.collect(tasks(3)))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(yard.collector.collect(named(4, "second")))
        await asyncio.sleep(0.05)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        simulators[0].answering.set()
        for item in await second:
            check(item)
        assert yard.told == [] and yard.leases.statistics()["failures"] == {}

    run(scene())


def test_each_request_has_its_own_count_of_units_that_are_given_up() -> None:
    async def scene() -> None:
        yard = await Yard(attempts=1, most_given_up=2).open()
        for name in ("simulator-0", "simulator-1"):
            made = iter([Raises(1, attempts=9), Raises(1, attempts=9), Count(), Count()])
            await yard.attach(name, envs=1, make=lambda made=made: Fresh(made))
        for part in await asyncio.gather(*(yard.collector.collect(named(1, name)) for name in ("first", "second"))):
            check(part[0])
        assert yard.leases.statistics()["given_up"] == 4

    run(scene())


class Fresh(Count):
    """Another world at each reset."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def reset(self, unit: Any) -> None:
        self.world = next(self.made, None) or Count()
        self.world.reset(unit)

    def step(self, action: Any) -> Any:
        return self.world.step(action)

    def observe(self) -> Any:
        return self.world.observe()
