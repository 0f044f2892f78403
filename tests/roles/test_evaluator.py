"""An evaluation has one record a unit, whatever simulators do, and their errors are no failures."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from cosmos_actor.roles.acting import Acted
from cosmos_actor.roles.evaluator import DONE, ERROR, Evaluator
from cosmos_actor.roles.films import Films
from cosmos_actor.simulator_bridge.contract import UNKNOWN, WorkUnit
from tests.roles.test_collector import Raises, run
from tests.roles.yard import DESCRIPTION, Count, Yard, length_of


async def act(observations: Any) -> Acted:
    state = observations["state"]
    zeros = np.zeros(len(state), np.float32)
    return Acted(state[:, 1].astype(np.int64) % 4, zeros, zeros, 7, state[:, 1:].astype(np.int64) % 4)


def units(count: int) -> list[WorkUnit]:
    return [WorkUnit(f"eval/{trial}", "count", seed=trial) for trial in range(count)]


def evaluator(yard: Yard, attempts: int = 3) -> Evaluator:
    return Evaluator(yard.gateway, act, yard.collector.limits, attempts, asyncio.get_running_loop().time,
                     yard.told.append, lambda tasks: {}, Films(DESCRIPTION, 0, 0))


def check(records: list[dict[str, Any]], count: int) -> None:
    assert [record["unit"] for record in records] == [f"eval/{trial}" for trial in range(count)]
    for record in records:
        length = length_of(record["seed"])
        if record["outcome"] == DONE:
            assert (record["length"], record["return"]) == (length, length * (length + 1) / 2)
            assert record["terminated"] is (record["seed"] % 2 == 0)


def test_every_unit_has_its_record_and_simulators_share_the_work() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        for name in ("simulator-0", "simulator-1"):
            await yard.attach(name, envs=2)
        records = await evaluator(yard).run(units(11))
        check(records, 11)
        assert {record["outcome"] for record in records} == {DONE}
        assert {record["actor"] for record in records} == {"simulator-0", "simulator-1"}

    run(scene())


def test_an_error_of_a_simulator_is_tried_again_and_no_failure_when_it_stays() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        made = iter([Raises(2), *(Count() for _ in range(9))])
        await yard.attach("simulator-0", envs=2, make=lambda: next(made))
        records = await evaluator(yard).run(units(5))
        check(records, 5)
        assert sorted(record["attempt"] for record in records) == [0, 0, 0, 0, 1]
        assert [failure["kind"] for failure in yard.told] == ["step"]

        always = await Yard().open()
        await always.attach("simulator-0", envs=2, make=lambda: Raises(1, attempts=99))
        given_up = await evaluator(always, attempts=2).run(units(3))
        check(given_up, 3)
        assert {(record["outcome"], record["success"], record["kind"]) for record in given_up} == {
            (ERROR, UNKNOWN, "step")}
        assert len(always.told) == 6

    run(scene())


def test_one_that_dies_is_replaced_by_one_that_comes_later() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        first = await yard.attach("simulator-0", envs=2)
        first.answering.clear()
        working = asyncio.ensure_future(evaluator(yard).run(units(4)))
        await asyncio.sleep(0.05)
        await first.die()
        await yard.attach("simulator-1", envs=2)
        records = await working
        check(records, 4)
        assert {record["actor"] for record in records} == {"simulator-1"}
        assert {failure["kind"] for failure in yard.told} == {"lost"}

    run(scene())
