"""A rollout of control says whom it waits for, and which simulators may work for it."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_actor.bus import DeadlineExceeded
from cosmos_actor.roles.control_messages import DescribeRequest
from cosmos_actor.roles.control_rollout import ControlRolloutRole, difference
from cosmos_actor.simulator_bridge.contract import ArraySpec, TaskSpec
from cosmos_actor.simulator_bridge.messages import Attach
from tests.roles.yard import DESCRIPTION, KIND, Yard, tasks


async def role(yard: Yard, **sim: Any) -> ControlRolloutRole:
    told: list[Any] = []

    async def emit(message: Any) -> None:
        told.append(message)

    settings = SimpleNamespace(run=SimpleNamespace(deadline_s=0.5), sim=SimpleNamespace(
        **{"kind": "", "options": {}, "embodiment": "", **sim}))
    context = SimpleNamespace(simulators=yard.gateway, settings=settings, identity=yard.bus.identity, emit=emit,
                              waiting=lambda what, on: nullcontext())
    made = ControlRolloutRole(context)  # type: ignore[arg-type]
    made.collector = yard.collector
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
        assert len(await rollout._collected(tasks(2))) == 2

    asyncio.run(scene())


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
