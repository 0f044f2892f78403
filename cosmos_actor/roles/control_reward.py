"""Reward for control: what the simulator gave, scaled and clipped as the settings say."""

from __future__ import annotations

import numpy as np

from cosmos_actor.actors.role import Role, handles
from cosmos_actor.roles.messages import ScoreRequest, Scores, scores_of


class ControlRewardRole(Role):
    """A pure function of the simulator's rewards."""

    name = "reward"

    @handles(ScoreRequest)
    def score(self, request: ScoreRequest) -> Scores:
        begun = self.context.clock.monotonic()
        columns = [self._scored(group.simulator_rewards) for group in request.groups]
        return scores_of(columns, self.context.identity.actor, self.context.clock.monotonic() - begun)

    def _scored(self, rewards: np.ndarray) -> np.ndarray:
        settings = self.context.settings.sim
        scaled = rewards * settings.reward_scale
        return np.clip(scaled, -settings.reward_clip, settings.reward_clip) if settings.reward_clip else scaled
