"""Critic for control, where it is a role of its own: what states are worth, and what the rewards teach it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cosmos_actor.actors.role import handles
from cosmos_actor.roles.control_messages import Judged, JudgeRequest
from cosmos_actor.roles.control_policy import ControlPolicyRole
from cosmos_actor.roles.judging import bootstraps
from cosmos_actor.roles.messages import Column, Saved, SaveRequest, UpdateReply


class ControlCriticRole(ControlPolicyRole):
    """Prepared, restored, saved and updated as the policy is, on the same fragments. Publishes nothing."""

    name = "critic"
    part = "critic"

    def device(self) -> str:
        return str(self.context.settings.critic.device)

    def _once(self, request: Any, update: Callable[[], Mapping[str, float]]) -> UpdateReply:
        self._pass_to(request.step - 1)
        return super()._once(request, update)

    @handles(SaveRequest)
    def save(self, request: SaveRequest) -> Saved:
        self._pass_to(request.step)
        return super().save(request)

    def _pass_to(self, step: int) -> None:
        """Nobody asks a critic for anything while the policy is shown what to do."""
        self.step = max(self.step, step)

    @handles(JudgeRequest)
    def judge(self, request: JudgeRequest) -> Judged:
        """`values` and `bootstrap` of each fragment, under the critic as it is."""
        self.refuse_another_life(request.epoch)
        values = [self.trainer.values(fragment.observations) for fragment in request.fragments]
        follows = bootstraps([fragment.boundary for fragment in request.fragments],
                             [fragment.after for fragment in request.fragments], self.trainer.values)
        return Judged([Column(column) for column in values], [Column(column) for column in follows],
                      self.context.identity.actor)
