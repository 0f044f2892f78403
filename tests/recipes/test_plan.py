"""A run's placement follows from its settings."""

from __future__ import annotations

import sys

import pytest

from cosmos_actor.actors.errors import UserError
from cosmos_actor.recipes.plan import TURNS_ANYWHERE, host_devices, plan, takes_turns
from cosmos_actor.recipes.resolve import recipe_names, resolve

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


GPU = ("policy.device=auto", "rollout.device=auto")


def turns(*flags: str, devices: tuple[str, ...] = ("0", "1")) -> bool:
    settings = resolve(BASE, [*GPU, *flags])
    return takes_turns(settings, plan(settings, devices=devices))


@pytest.mark.parametrize(("flags", "taken"), [
    ((), True), (("run.colocated_offload=false",), False), (("run.placement=disaggregated",), False),
    (("policy.device=cpu", "rollout.device=cpu"), False), (("rollout.count=0",), False),
    (("policy.ranks=2", "rollout.count=2"), True), (("policy.ranks=2",), True), (("run.grouping=single",), True),
    (("policy.devices=[1]", "rollout.devices=[1]"), True), (("rollout.engine=vllm",), True),
])
def test_policy_and_rollouts_take_turns_where_they_share_a_gpu_unless_told_otherwise(flags, taken) -> None:
    assert turns(*flags) is taken


def test_without_a_gpu_there_are_no_turns_unless_a_test_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert turns(devices=()) is False
    monkeypatch.setenv(TURNS_ANYWHERE, "1")
    assert turns(devices=()) is True


def test_simulators_take_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = resolve("ppo-cartpole", ["control.device=auto"])
    assert takes_turns(settings, plan(settings, devices=("0",))) is False


def test_samples_ahead_of_the_weights_and_turns_exclude_each_other_in_one_line() -> None:
    remedy = r"run\.max_staleness = 1 .* take turns: 0, or run\.colocated_offload = false"
    with pytest.raises(UserError, match=remedy) as no:
        turns("run.max_staleness=1")
    assert "\n" not in str(no.value)
    assert turns("run.max_staleness=1", "run.colocated_offload=false") is False
    assert turns("run.max_staleness=1", devices=()) is False
    assert turns("run.max_staleness=1", "run.placement=disaggregated") is False


def test_versions_that_stay_on_the_gpu_and_turns_exclude_each_other_in_one_line() -> None:
    with pytest.raises(UserError, match=r"cuda_ipc.* keeps versions on the GPU .* run\.colocated_offload = false"):
        turns("weights.transport=cuda_ipc")
    assert turns("weights.transport=cuda_ipc", "run.colocated_offload=false") is False


@pytest.mark.parametrize("recipe", recipe_names())
def test_no_packaged_recipe_is_refused_on_one_gpu(recipe: str) -> None:
    settings = resolve(recipe, [])
    takes_turns(settings, plan(settings, devices=("0",)))
