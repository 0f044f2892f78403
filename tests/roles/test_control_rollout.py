"""A rollout of control says whom it waits for, and which simulators may work for it."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_actor.actors.errors import BadValue, UserError
from cosmos_actor.bus import DeadlineExceeded
from cosmos_actor.roles.control_messages import CollectRequest, DescribeRequest, EvaluateRequest
from cosmos_actor.roles.control_rollout import ControlRolloutRole, difference
from cosmos_actor.simulator_bridge.contract import ArraySpec, TaskSpec, WorkUnit
from cosmos_actor.simulator_bridge.messages import Attach
from tests.roles.yard import DESCRIPTION, KIND, Yard, tasks


def settings_of(**sim: Any) -> Any:
    return SimpleNamespace(run=SimpleNamespace(deadline_s=0.5, seed=0), sim=SimpleNamespace(**{
        "kind": "", "options": {}, "embodiment": "", "tasks": (), "source": "in_turn", "driver": "collector",
        "step_s": 5.0, "reset_s": 5.0, "most_given_up": 2, "max_wait_ms": 5.0, "least_rows": 0, "attempts": 3,
        "lease_s": 60.0, **sim}))


async def role(yard: Yard, **sim: Any) -> ControlRolloutRole:
    told: list[Any] = []

    async def emit(message: Any) -> None:
        told.append(message)

    settings = settings_of(**sim)
    context = SimpleNamespace(simulators=yard.gateway, settings=settings, identity=yard.bus.identity, emit=emit,
                              clock=SimpleNamespace(monotonic=asyncio.get_running_loop().time), tick=lambda: None,
                              waiting=lambda what, on: nullcontext())
    made = ControlRolloutRole(context)  # type: ignore[arg-type]
    made.driver = yard.collector
    made.told = told  # type: ignore[attr-defined]
    return made


def test_fragments_that_nobody_can_make_are_missed_before_the_asker_gives_up():
    async def scene() -> None:
        yard = await Yard().open()
        rollout = await role(yard)
        with pytest.raises(DeadlineExceeded, match="rollout-0 has not collected 2 fragments within 0.45 s; simulators "
                                                   "attached to it: none") as missed:
            await rollout._collected(tasks(2))
        assert missed.value.setting == "sim.count"
        await yard.attach("simulator-0")
        assert len((await rollout._collected(tasks(2)))[1]) == 2

    asyncio.run(scene())


@pytest.mark.parametrize("ask", ["collect", "evaluate"])
def test_who_waits_behind_others_for_the_simulators_is_answered_before_the_asker_gives_up(ask: str):
    async def scene() -> None:
        yard = await Yard().open()
        await yard.attach("simulator-0")
        rollout = await role(yard, videos=0, failed_videos=0)
        rollout.description, rollout.wait_for_version = DESCRIPTION, at_once  # type: ignore[method-assign]
        request = {"collect": CollectRequest(tasks(2), 7, 0, 1.0),
                   "evaluate": EvaluateRequest([WorkUnit("count/0", "count", seed=0)], 7, 0, 1.0)}[ask]
        async with rollout.simulators_for.alone():
            with pytest.raises(DeadlineExceeded, match="within 0.45 s; simulators attached to it: simulator-0"):
                await asyncio.wait_for(getattr(rollout, ask)(request), 2.0)
        assert len((await rollout._collected(tasks(2)))[1]) == 2

    asyncio.run(scene())


async def at_once(*_: Any) -> None:
    """The version is there."""


def test_the_first_simulator_says_what_the_run_is_about_and_nobody_is_an_error_that_says_so():
    async def scene() -> None:
        yard = await Yard().open()
        rollout = await role(yard)
        with pytest.raises(DeadlineExceeded, match="no simulator of any kind has attached to rollout-0 within 0.1 s"):
            await rollout.describe(DescribeRequest(0.1))
        await yard.attach("simulator-0")
        assert (await rollout.describe(DescribeRequest(1.0))).simulator == KIND
        await asyncio.sleep(0)
        assert [(event.what, event.facts["simulator"]) for event in rollout.told] == [("attached", "simulator-0")]

    asyncio.run(scene())


def test_what_can_not_be_driven_is_the_answer_to_whoever_asks_what_the_simulators_are():
    async def scene() -> None:
        for sim, line in (({"tasks": ("cuont",)}, "test:count has no task `cuont`"),
                          ({"source": "tests.job.plug_ins:TOP.bit_length"}, "the source tests.job.plug_ins:TOP"),
                          ({"driver": "tests.job.plug_ins:no_driver"}, "no_driver gave object, which has not all of")):
            yard = await Yard().open()
            rollout = await role(yard, **sim)
            rollout.driver = None
            await yard.attach("simulator-0")
            with pytest.raises(UserError, match=line):
                await rollout.describe(DescribeRequest(1.0))

    asyncio.run(scene())


def test_a_driver_is_made_by_name_with_what_the_built_in_one_is_made_with():
    async def scene() -> None:
        yard = await Yard().open()
        rollout = await role(yard, driver="tests.job.plug_ins:Twice")
        driver = made(rollout)
        await yard.attach("simulator-0")
        found = await driver.collect(tasks(2, 16))
        seeds = [episode["seed"] for item in found for episode in item["episodes"]]
        assert seeds and len(set(seeds)) < len(seeds)
        assert driver.statistics()["leases"]["done"] == len(seeds)

    asyncio.run(scene())


@pytest.mark.parametrize(("driver", "line"), [
    ("no_driver", "the driver tests.job.plug_ins:no_driver gave object, which has not all of collect, interrupt"),
    ("backwards", "the driver tests.job.plug_ins:backwards raised TypeError: backwards")])
def test_what_makes_no_driver_is_one_line_and_the_answer_to_the_next_weights(driver, line):
    async def scene() -> None:
        rollout = await role(await Yard().open(), driver=f"tests.job.plug_ins:{driver}")
        with pytest.raises(BadValue, match=line) as refused:
            made(rollout)
        rollout.unfit = refused.value
        rollout.made.set()
        with pytest.raises(BadValue, match=line):
            await rollout.ready_for_weights()

    asyncio.run(scene())


def made(rollout: ControlRolloutRole) -> Any:
    """Its driver, for a policy that draws nothing."""
    rollout.driver = None
    rollout.engine = SimpleNamespace(noise=lambda generator, rows: generator.random(rows), quick=True, act=act,
                                     commands=lambda actions: actions[:, None])
    rollout.instructions = SimpleNamespace(told=lambda names: {})  # type: ignore[assignment]
    rollout.held = SimpleNamespace(version=SimpleNamespace(step=7))  # type: ignore[assignment]
    rollout._make_driver(DESCRIPTION)
    return rollout.driver


def act(observations: Any, noise: Any) -> Any:
    state = observations["state"]
    return (state[:, 1].astype("int64") % 4, state[:, 0].copy(), state[:, 1].copy())


@pytest.mark.parametrize(("change", "line"), [
    ({"observations": {"state": ArraySpec("float32", (3,))}}, "its `observations` is"),
    ({"embodiment": "ffee"}, "its `embodiment` is ffee, the run's is "), ({"simulator": "other:x"}, "its `simulator`"),
    ({"tasks": [TaskSpec("another", 5)]}, "it lacks the tasks count")])
def test_two_installations_that_one_policy_can_not_serve_are_told_apart(change, line):
    assert line in str(difference(DESCRIPTION, replace(DESCRIPTION, **change)))
    assert difference(DESCRIPTION, replace(DESCRIPTION, libraries={"numpy": "1.22.4"}, max_envs=3)) is None


@pytest.mark.parametrize(("sim", "line"), [
    ({"kind": "gymnasium:CartPole-v1"}, "about gymnasium:CartPole-v1 (sim.kind, sim.options), not about test:count"),
    ({"kind": "test:count", "options": {"top": 5}}, "about test:count?top=5 (sim.kind, sim.options), not about"),
    ({"embodiment": "0123456789abcdef"}, "has embodiment none, the run asks for 0123456789ab (sim.embodiment)")])
def test_a_simulator_that_the_settings_do_not_want_is_refused_with_a_line(sim, line):
    async def scene() -> None:
        rollout = await role(await Yard().open(), **sim)
        assert line in str(rollout._refusal("simulator-0", Attach("s", 2, DESCRIPTION)))
        await asyncio.sleep(0)
        assert rollout.told[0].what == "refused"
        wanted = await role(await Yard().open())
        assert wanted._refusal("simulator-0", Attach("s", 2, DESCRIPTION)) is None

    asyncio.run(scene())
