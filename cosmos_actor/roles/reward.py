"""Reward: judges texts by the task's own verifier. No torch, no model."""

from __future__ import annotations

import asyncio
import math

import numpy as np

from cosmos_actor.actors.role import Role, handles
from cosmos_actor.actors.trajectory import TrajectoryGroup
from cosmos_actor.bus.errors import DeadlineExceeded
from cosmos_actor.roles.messages import ScoreRequest, Scores, scores_of
from cosmos_actor.roles.task import load_task


class NoReward(Exception):
    """A verifier answered something that is no reward."""


class RewardRole(Role):
    """Scores groups. A verifier that raises, is late or gives no finite number is an error of the call, never a 0."""

    name = "reward"

    def setup(self) -> None:
        self.task = load_task(self.context.settings, self.context.settings.run.seed)

    @handles(ScoreRequest, concurrency=4)
    async def score(self, request: ScoreRequest) -> Scores:
        """Raises DeadlineExceeded `reward.deadline_s` after the request; what is graded then is not waited for."""
        deadline_s = self.context.settings.reward.deadline_s
        try:
            return await asyncio.wait_for(self.context.compute("score", self._score, request), deadline_s)
        except asyncio.TimeoutError as error:
            raise DeadlineExceeded(f"{self.context.identity.actor} has not graded {len(request.groups)} groups after "
                                   f"{deadline_s:g} s", setting="reward.deadline_s") from error

    def _score(self, request: ScoreRequest) -> Scores:
        begun = self.context.clock.monotonic()
        columns = [
            np.array([self._judged(group, text) for text in group.texts], dtype=np.float32) for group in request.groups
        ]
        return scores_of(columns, self.context.identity.actor, self.context.clock.monotonic() - begun)

    def _judged(self, group: TrajectoryGroup, text: str) -> float:
        """One NaN would make a NaN of every weight of the model."""
        reward = self.task.reward(group.task, text)
        if not isinstance(reward, (int, float, np.number)) or not math.isfinite(reward):
            task = self.context.settings.data.task
            raise NoReward(f"{task} gave {reward!r} for {group.group_id}, not a finite number")
        return float(reward)
