"""The placement that a run's settings ask for, on this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.actors.placement import Plan, RoleDemand, place
from cosmos_actor.recipes.settings import RunSettings
from cosmos_actor.roles.engines import SLEEPERS
from cosmos_actor.simulator_bridge.messages import SIMULATOR

TURNS_ANYWHERE = "COSMOS_ACTOR_TURNS_ANYWHERE"
"""Set, policy and rollouts have a CPU in turn, too: the whole of it can be tested without a GPU."""


def demands(settings: RunSettings) -> list[RoleDemand]:
    """What each role asks for, in the order in which actors are started. A reference only while the KL term is on.

    The controller is no role: it has a process of its own, or shares the one of `run.grouping` = "single".
    """
    rollout, policy, reference, critic = settings.rollout, settings.policy, settings.reference, settings.critic
    asked = [
        RoleDemand(role="data", threads=settings.data.threads, python=settings.data.python),
        RoleDemand(role="reward", count=settings.reward.count, threads=settings.reward.threads,
                   python=settings.reward.python),
        RoleDemand(role="replay_buffer", threads=settings.replay_buffer.threads, python=settings.replay_buffer.python),
        RoleDemand(role="reference", count=settings.reference_count, threads=reference.threads, python=reference.python,
                   device=reference.device, devices=reference.devices),
        RoleDemand(role="critic", count=settings.critic_count, threads=critic.threads, python=critic.python,
                   device=critic.device, devices=critic.devices),
        RoleDemand(role="policy", ranks=policy.ranks, threads=policy.threads, python=policy.python,
                   device=policy.device, devices=policy.devices),
        RoleDemand(role="rollout", count=rollout.count, joining=max(0, rollout.min_actors - rollout.count),
                   threads=rollout.threads, python=rollout.python, device=rollout.device, devices=rollout.devices),
    ]
    if settings.run.experience == SIMULATOR:
        asked = [_for_control(demand, settings) for demand in asked]
        asked.append(RoleDemand(role=SIMULATOR, count=settings.sim.count, threads=settings.sim.threads,
                                python=settings.sim.python))
    return [demand for demand in asked if demand.count or demand.joining]


def _for_control(demand: RoleDemand, settings: RunSettings) -> RoleDemand:
    """Control policies have their own say about devices and threads."""
    if demand.role not in ("policy", "rollout"):
        return demand
    return replace(demand, device=settings.control.device, threads=settings.control.threads)


def host_devices() -> tuple[str, ...]:
    """This host's GPUs as CUDA_VISIBLE_DEVICES names them, found without loading a driver."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name for name in chosen.split(",") if name and name != "-1")
    numbers = sorted(int(path.name.removeprefix("nvidia")) for path in Path("/dev").glob("nvidia[0-9]*"))
    return tuple(map(str, numbers))


def plan(settings: RunSettings, devices: Sequence[str] | None = None, python: str = sys.executable) -> Plan:
    """Where every local actor of the run but the controller goes. Raises PlacementRefused, naming what to change."""
    return place(demands(settings), grouping=settings.run.grouping, placement=settings.run.placement,
                 devices=host_devices() if devices is None else devices, python=python)


def takes_turns(settings: RunSettings, placed: Plan) -> bool:
    """Whether the policy and the rollouts of this host have their GPUs in turn. Raises BadValue for settings that need
    both at once."""
    run = settings.run
    together = (run.placement == "colocated" and run.experience != SIMULATOR and settings.rollout.count > 0
                and settings.rollout.engine in SLEEPERS)
    held = {role: {device for one in placed.actors if one.role == role for device in one.devices}
            for role in ("policy", "rollout")}
    shared = bool(held["policy"] & held["rollout"]) or TURNS_ANYWHERE in os.environ
    if not (run.colocated_offload and together and shared):
        return False
    if run.max_staleness > 0:
        raise BadValue(f"run.max_staleness = {run.max_staleness} generates while it trains, and on one GPU they take "
                       "turns: 0, or run.colocated_offload = false if both fit, or run.placement = \"disaggregated\"",
                       setting="run.max_staleness")
    if settings.weights.transport == "cuda_ipc":
        raise BadValue("weights.transport = \"cuda_ipc\" keeps versions on the GPU that the rollouts have in turn:"
                       " \"auto\", or run.colocated_offload = false if both fit", setting="weights.transport")
    return True
