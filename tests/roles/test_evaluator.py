"""An evaluation has one record a unit, whatever simulators do, and their errors are no failures."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_actor.roles.acting import Acted
from cosmos_actor.roles.evaluator import DONE, ERROR, Evaluator
from cosmos_actor.roles.films import Films
from cosmos_actor.simulator_bridge.contract import FAILURE, SUCCESS, UNKNOWN, ArraySpec, WorkUnit
from tests.roles import yard as yard_module
from tests.roles.test_collector import Raises, run
from tests.roles.yard import DESCRIPTION, Count, Yard, length_of


async def act(observations: Any, keys: Any) -> Acted:
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


def test_one_that_leaves_in_the_middle_is_no_attempt() -> None:
    async def scene() -> None:
        yard = await Yard().open()
        leaving = await yard.attach("simulator-0", envs=2)
        leaving.answering.clear()
        working = asyncio.ensure_future(evaluator(yard, attempts=1).run(units(4)))
        await asyncio.sleep(0.05)
        await leaving.leave()
        await yard.attach("simulator-1", envs=2)
        records = await working
        check(records, 4)
        assert {(record["outcome"], record["actor"]) for record in records} == {(DONE, "simulator-1")}
        assert yard.told == []

    run(scene())


class Seen(Count):
    """Shows how many steps its episode has had, as a grey, and fails where the seed is odd."""

    def observe(self) -> dict[str, np.ndarray]:
        return {**super().observe(), "picture": np.full((160, 160, 3), 30 * self.at, np.uint8)}

    def success(self) -> int:
        return FAILURE if self.seed % 2 else SUCCESS


def steps_of(video: bytes, folder: Path) -> list[tuple[int, int]]:
    """(when, what is seen) of each frame, both in steps."""
    (folder / "film.mp4").write_bytes(video)
    with pytest.importorskip("av").open(str(folder / "film.mp4")) as container:
        return [(round(float(frame.pts * frame.time_base) * 10), round(frame.to_ndarray(format="rgb24").mean() / 30))
                for frame in container.decode(video=0)]


def test_the_first_trial_is_filmed_step_by_step_and_failures_where_the_policy_looks(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    seen = dataclasses.replace(DESCRIPTION, observations={
        **DESCRIPTION.observations, "picture": ArraySpec("uint8", (160, 160, 3))})
    monkeypatch.setattr(yard_module, "DESCRIPTION", seen)

    async def two_at_once(observations: Any, keys: Any) -> Acted:
        acted = await act(observations, keys)
        return dataclasses.replace(acted, commands=np.repeat(acted.commands, 2, axis=1))

    films = Films(seen, videos=1, failed=1)

    async def scene() -> None:
        yard = await Yard().open()
        await yard.attach("simulator-0", envs=1, make=Seen)
        evaluation = Evaluator(yard.gateway, two_at_once, yard.collector.limits, 3, asyncio.get_running_loop().time,
                               yard.told.append, lambda tasks: {}, films)
        await evaluation.run([WorkUnit(f"count/{trial}", "count", seed=4 + trial) for trial in range(4)])

    run(scene())
    videos = films.finish()
    assert set(videos) == {"count/0", "count/1"}  # of the failures, 1 and 3, one
    assert steps_of(videos["count/0"], tmp_path) == [(step, step) for step in range(length_of(4) + 1)]
    assert steps_of(videos["count/1"], tmp_path) == [(0, 0), (2, 2), (3, 3)]
