"""Which class plays which role. Roles are loaded by name, so that only their own process pays for what they import."""

from __future__ import annotations

from typing import Any

from cosmos_actor.actors.context import Context
from cosmos_actor.actors.loading import load_object
from cosmos_actor.actors.role import Role
from cosmos_actor.actors.role_names import REGISTRY, SUPERVISOR
from cosmos_actor.simulator_bridge.messages import SIMULATOR

ROLE_CLASSES = {
    "data": "cosmos_actor.roles.data:DataRole",
    "rollout": "cosmos_actor.roles.rollout:RolloutRole",
    "reward": "cosmos_actor.roles.reward:RewardRole",
    "replay_buffer": "cosmos_actor.roles.replay_buffer:ReplayBufferRole",
    "reference": "cosmos_actor.roles.reference:ReferenceRole",
    "policy": "cosmos_actor.roles.policy:PolicyRole",
}
CONTROL_CLASSES = {
    **ROLE_CLASSES,
    "data": "cosmos_actor.roles.control_data:ControlDataRole",
    "rollout": "cosmos_actor.roles.control_rollout:ControlRolloutRole",
    "reward": "cosmos_actor.roles.control_reward:ControlRewardRole",
    "reference": "cosmos_actor.roles.control_reference:ControlReferenceRole",
    "critic": "cosmos_actor.roles.control_critic:ControlCriticRole",
    "policy": "cosmos_actor.roles.control_policy:ControlPolicyRole",
}
"""The same roles where simulators give the experience."""
CONTROLLER = "controller"
STATEFUL = frozenset({"policy", "critic", "replay_buffer"})
"""Roles whose death rewinds the job; a test compares it with the classes."""
KEYED_ROLES = (SUPERVISOR, REGISTRY, CONTROLLER, *CONTROL_CLASSES, SIMULATOR)
"""Every role of a run has its own key pair."""


def build_role(name: str, context: Context) -> Role:
    """The role object of `name` in this process."""
    classes = CONTROL_CLASSES if context.settings.run.experience == SIMULATOR else ROLE_CLASSES
    role_class: Any = load_object(classes[name], setting="--role")
    return role_class(context)  # type: ignore[no-any-return]
