"""A run's placement follows from its settings."""

from __future__ import annotations

import sys

import pytest

from cosmos_actor.actors.errors import UserError
from cosmos_actor.recipes.plan import host_devices, plan
from cosmos_actor.recipes.resolve import resolve

BASE = "grpo-arithmetic"


def roles(*flags: str) -> list[str]:
    return [actor.actor for actor in plan(resolve(BASE, flags), devices=()).actors]


def test_each_count_is_placed_and_the_reference_only_with_a_kl_term() -> None:
    assert roles("rollout.count=2", "reward.count=2", "policy.grpo.kl_coefficient=0.1") == [
        "data-0", "reward-0", "reward-1", "replay_buffer-0", "reference-0", "policy-0", "rollout-0", "rollout-1"]
    assert "reference-0" not in roles("policy.grpo.kl_coefficient=0.0")


def test_a_run_whose_rollout_joins_from_elsewhere_places_none_here() -> None:
    assert "rollout-0" not in roles("rollout.count=0")


def test_a_role_that_names_an_interpreter_gets_it_and_the_others_the_running_one() -> None:
    placed = plan(resolve(BASE, ["rollout.python=/opt/py"]), devices=())
    assert {actor.python for actor in placed.actors} == {"/opt/py", sys.executable}


def test_policy_and_rollout_share_the_devices_of_a_host_when_colocated() -> None:
    flags = ["rollout.count=1", "policy.device=auto", "rollout.device=auto"]
    placed = {actor.role: actor.devices for actor in plan(resolve(BASE, flags), devices=("0", "1")).actors}
    assert placed["policy"] == placed["rollout"] == ("0",)


def test_what_can_not_be_placed_names_the_setting() -> None:
    with pytest.raises(UserError, match="rollout.python"):
        plan(resolve(BASE, ["run.grouping=single", "rollout.python=/opt/py"]), devices=())


def test_the_devices_of_this_host_are_those_that_cuda_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7")
    assert host_devices() == ("2", "GPU-7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert host_devices() == ()
