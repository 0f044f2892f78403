"""Every cell of grouping x placement: what it gives, or why it is refused."""

from __future__ import annotations

from itertools import product

import pytest

from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.placement import (
    GROUPINGS,
    PLACEMENTS,
    ActorGroup,
    DeviceGroup,
    PlacementRefused,
    Plan,
    RoleDemand,
    place,
)


def a_job(**changes: dict) -> list[RoleDemand]:
    """The six roles of a job; `rollout={"count": 2}` changes one of them."""
    roles = {
        "data": {},
        "rollout": {"device": "auto"},
        "reward": {},
        "replay_buffer": {},
        "reference": {"device": "auto", "count": 0},
        "policy": {"device": "auto"},
    }
    return [RoleDemand(role=role, **{**fields, **changes.get(role, {})}) for role, fields in roles.items()]


def plan(
    *, grouping: str = "per_role", placement: str = "disaggregated", gpus: int = 0, **changes: dict
) -> Plan:
    names = [str(number) for number in range(gpus)]
    return place(a_job(**changes), grouping=grouping, placement=placement, devices=names, python="/opt/python")


def devices(made: Plan) -> dict[str, tuple[str, ...]]:
    return {placed.actor: placed.devices for placed in made.actors if placed.devices}


@pytest.mark.parametrize(("grouping", "placement"), [*product(GROUPINGS, PLACEMENTS)])
def test_without_gpus_every_cell_is_legal_and_on_the_cpu(grouping, placement):
    made = plan(grouping=grouping, placement=placement, rollout={"count": 2})
    assert [placed.actor for placed in made.actors] == [
        "data-0", "rollout-0", "rollout-1", "reward-0", "replay_buffer-0", "policy-0"]
    assert devices(made) == {} and {placed.device for placed in made.actors} == {"cpu"}
    assert all(placed.env["CUDA_VISIBLE_DEVICES"] == "" for placed in made.actors)
    assert len(made.actor_groups) == (1 if grouping == "single" else 6)


def test_per_role_gives_every_actor_a_process_and_its_own_interpreter():
    made = plan(reward={"python": "/opt/judge/bin/python"}, policy={"threads": 2})
    assert made.actor_groups[0] == ActorGroup(0, ("data-0",)) and len(made.actor_groups) == 5
    python = {placed.role: placed.python for placed in made.actors}
    assert python["reward"] == "/opt/judge/bin/python" and python["policy"] == "/opt/python"
    assert made.actors[-1].env == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}


def test_colocated_puts_each_rollout_on_a_device_of_the_policy():
    made = plan(placement="colocated", gpus=2, policy={"ranks": 2}, rollout={"count": 2})
    assert devices(made) == {"policy-0": ("0", "1"), "rollout-0": ("0",), "rollout-1": ("1",)}
    assert made.device_groups == (DeviceGroup(("0", "1"), ("rollout", "policy")),)
    assert made.actors[-1].env["CUDA_VISIBLE_DEVICES"] == "0,1" and made.actors[-1].device == "cuda"


def test_disaggregated_gives_every_role_its_own_devices():
    made = plan(gpus=4, policy={"ranks": 2}, rollout={"count": 1}, reference={"count": 1})
    assert devices(made) == {"policy-0": ("0", "1"), "reference-0": ("2",), "rollout-0": ("3",)}
    assert [group.roles for group in made.device_groups] == [("rollout",), ("reference",), ("policy",)]


def test_devices_asked_for_by_name_are_kept_from_the_others():
    made = plan(gpus=3, rollout={"count": 2, "devices": ("0", "2")})
    assert devices(made) == {"rollout-0": ("0",), "rollout-1": ("2",), "policy-0": ("1",)}
    shared = plan(placement="colocated", gpus=2, policy={"devices": ("1",)})
    assert devices(shared) == {"policy-0": ("1",), "rollout-0": ("1",)}


def test_a_role_on_the_cpu_takes_no_device():
    made = plan(placement="colocated", gpus=1, reference={"count": 1, "device": "cpu"})
    assert devices(made) == {"rollout-0": ("0",), "policy-0": ("0",)}


def test_a_role_without_actors_here_asks_for_nothing():
    made = plan(gpus=1, rollout={"count": 0, "joining": 3, "device": "cuda"})
    assert devices(made) == {"policy-0": ("0",)}


REFUSED = {
    "an unknown grouping": ({"grouping": "per_host"}, "no such grouping", "run.grouping"),
    "an unknown placement": ({"placement": "spread"}, "no such placement", "run.placement"),
    "single x actors from elsewhere": (
        {"grouping": "single", "rollout": {"count": 0, "joining": 2}}, "join from elsewhere", "run.grouping"),
    "single x ranks": ({"grouping": "single", "policy": {"ranks": 2}}, "policy has 2 ranks", "policy.ranks"),
    "single x another interpreter": (
        {"grouping": "single", "reward": {"python": "/opt/judge"}}, "another interpreter", "reward.python"),
    "single x two numbers of threads": (
        {"grouping": "single", "policy": {"threads": 2}}, "rollout wants 1 threads and policy 2", "policy.threads"),
    "cuda without a GPU": ({"policy": {"device": "cuda"}}, "this host has no GPU", "policy.device"),
    "a device that is not there": (
        {"gpus": 2, "policy": {"devices": ("5",)}}, "asks for device 5, this host has 0, 1", "policy.devices"),
    "devices on the CPU": (
        {"gpus": 1, "policy": {"device": "cpu", "devices": ("0",)}}, "computes on none", "policy.devices"),
    "fewer devices than ranks": (
        {"gpus": 3, "policy": {"ranks": 2, "devices": ("0",)}}, "1 devices for 1 actors of 2 ranks", "policy.devices"),
    "a device twice": (
        {"gpus": 3, "policy": {"ranks": 2, "devices": ("0", "0")}}, "names device 0 twice", "policy.devices"),
    "disaggregated x a shared device": (
        {"gpus": 2, "policy": {"devices": ("0",)}, "rollout": {"devices": ("0",)}}, "both name device 0",
        "run.placement"),
    "a third role on a device": (
        {"gpus": 2, "placement": "colocated", "policy": {"devices": ("0",)},
         "reference": {"count": 1, "devices": ("0",)}}, "only rollout and policy may share", "policy.devices"),
    "disaggregated x too few devices": (
        {"gpus": 2, "policy": {"ranks": 2}}, "rollout needs 1 devices of its own, 0 of 2 are free", "run.placement"),
    "no device left for the reference": (
        {"gpus": 1, "placement": "colocated", "reference": {"count": 1}}, "reference needs 1", "reference.device"),
    "colocated x more ranks than devices": (
        {"gpus": 2, "placement": "colocated", "policy": {"ranks": 4}}, "4 ranks, this host has 2", "policy.ranks"),
    "colocated x more rollouts than devices": (
        {"gpus": 2, "placement": "colocated", "rollout": {"count": 2}}, "rollout has 2 ranks on the policy's 1",
        "rollout.count"),
    "colocated x one of them on the CPU": (
        {"gpus": 1, "placement": "colocated", "policy": {"device": "cpu"}}, "only rollout computes on a GPU",
        "run.placement"),
    "colocated x different devices": (
        {"gpus": 2, "placement": "colocated", "policy": {"devices": ("0",)}, "rollout": {"devices": ("1",)}},
        "rollout and policy name different devices", "run.placement"),
    "colocated x devices for rollout alone": (
        {"gpus": 2, "placement": "colocated", "rollout": {"devices": ("1",)}}, "policy, whose devices it shares",
        "policy.devices"),
    "disaggregated x more policy ranks than devices": (
        {"gpus": 2, "policy": {"ranks": 4}}, "policy needs 4 devices of its own, 2 of 2 are free", "policy.device"),
    "a device for a role that runs no model": ({"reward": {"device": "cuda"}}, "reward is no role", "reward.device"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_illegal_cell_is_refused_by_name_with_the_setting_to_change(name):
    question, reason, setting = REFUSED[name]
    with pytest.raises(PlacementRefused) as raised:
        plan(**question)
    line = str(raised.value)
    cell = f"{question.get('grouping', 'per_role')} x {question.get('placement', 'disaggregated')} can not be placed"
    assert line.startswith(cell) and reason in line and "\n" not in line
    assert raised.value.setting == setting and setting in line
    assert isinstance(raised.value, UserError)


def test_no_two_actors_share_a_device_unless_rollout_and_policy_are_colocated():
    questions = product(PLACEMENTS, range(1, 5), range(1, 4), range(0, 4), range(0, 2))
    placed = 0
    for placement, gpus, ranks, rollouts, references in questions:
        try:
            made = plan(placement=placement, gpus=gpus, policy={"ranks": ranks}, rollout={"count": rollouts},
                        reference={"count": references})
        except PlacementRefused:
            continue
        placed += 1
        sharers: dict[str, list[str]] = {}
        for actor in made.actors:
            assert len(actor.devices) in (0, actor.ranks)
            for device in actor.devices:
                sharers.setdefault(device, []).append(actor.role)
        allowed = [["rollout", "policy"]] if placement == "colocated" else []
        assert all(len(roles) == 1 or roles in allowed for roles in sharers.values())
    assert placed > 20
