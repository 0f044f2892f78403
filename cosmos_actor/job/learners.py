"""The roles that learn, as a recipe calls them: the policy, and a critic where it is a role of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from cosmos_actor.actors.experience import Group
from cosmos_actor.actors.handle import Handle, settled
from cosmos_actor.job.clients import Client
from cosmos_actor.job.intake import Groups, keys_of, used
from cosmos_actor.roles.control_messages import CloneRequest, Judged, JudgeRequest, PrepareRequest, ShownMoments
from cosmos_actor.roles.messages import (
    Demonstrations,
    RestoreRequest,
    SaveRequest,
    SftRequest,
    UpdateReply,
    UpdateRequest,
)
from cosmos_actor.simulator_bridge.contract import Description


class Trained(Client):
    """A role that learns from experience and is part of every checkpoint."""

    role: str

    def prepare(self, description: Description) -> None:
        """Have the network for these simulators made, or restored; waits for it."""
        request = PrepareRequest(self._job.epoch, description)
        self._job.call(self.role, request, f"the {self.role} for {description.simulator}").resolve()

    def update(self, groups: Handle[list[Group]], step: int) -> Handle[dict[str, Any]]:
        """Optimiser step `step` on scored groups; its metrics."""
        return self._job.handle(self._update(groups, step), f"{self.role} update {step}")

    def save(self, directory: str, step: int) -> Handle[Any]:
        request = SaveRequest(directory, self._job.epoch, step)
        return self._job.call(self.role, request, f"the {self.role}'s checkpoint {step}")

    def restore(self, directory: str | None, step: int) -> Handle[Any]:
        request = RestoreRequest(directory, self._job.epoch, step)
        return self._job.call(self.role, request, f"the {self.role}'s restore to step {step}")

    async def _update(self, groups: Handle[list[Group]], step: int) -> dict[str, Any]:
        job, epoch = self._job, self._job.epoch

        async def train(batch: list[Group]) -> dict[str, Any]:
            request = UpdateRequest(epoch, step, batch)
            answer: UpdateReply = await job.submit(self.role, request, f"{self.role} update {step}")
            return {**answer.metrics, **self._trained(batch, answer, step)}

        return await used(job, groups, train)

    def _trained(self, batch: list[Group], answer: UpdateReply, step: int) -> dict[str, Any]:
        """What else there is to say about the step."""
        return {}


class Critic(Trained):
    """A critic in a process of its own. In a job without one nothing here does anything."""

    role = "critic"

    @property
    def present(self) -> bool:
        return bool(self._job.settings.critic_count)

    def prepare(self, description: Description) -> None:
        if self.present:
            super().prepare(description)

    def judge(self, groups: Handle[list[Group]] | list[Group]) -> Handle[list[Group]]:
        """The same fragments with what their states, and what follows them, are worth."""
        again = partial(self._judge, groups)
        return self._job.handle(again(), "values of the critic", again=again)

    async def _judge(self, groups: Handle[list[Group]] | list[Group]) -> list[Group]:
        async def ask(batch: list[Group]) -> list[Group]:
            parts = await asyncio.gather(*(self._judged(part) for part in self._job.in_parts(batch)))
            return [group for part in parts for group in part]

        return await used(self._job, groups, ask) if self.present else await settled(groups)

    async def _judged(self, groups: Groups) -> Groups:
        request = JudgeRequest(self._job.epoch, groups)  # type: ignore[arg-type]
        answer: Judged = await self._job.submit(self.role, request, "values of the critic")
        return [group.with_field("values", values.values, answer.writer)
                .with_field("bootstrap", follows.values, answer.writer)
                for group, values, follows in zip(groups, answer.values, answer.bootstrap, strict=True)]

    async def _update(self, groups: Handle[list[Group]], step: int) -> dict[str, Any]:
        if not self.present:
            return {}
        return {f"critic/{name}": value for name, value in (await super()._update(groups, step)).items()}


class Policy(Trained):
    """Training."""

    role = "policy"

    def clone(self, shown: Handle[ShownMoments], step: int) -> Handle[dict[str, Any]]:
        """Optimiser step `step` on demonstrated moments; its metrics."""
        epoch, what = self._job.epoch, f"cloning step {step}"
        return self._job.handle(self._shown(shown, partial(CloneRequest, epoch, step), what), what)

    def sft(self, demonstrations: Handle[Demonstrations], step: int) -> Handle[dict[str, Any]]:
        """Optimiser step `step` on demonstrations; its metrics."""
        epoch, what = self._job.epoch, f"SFT step {step}"
        asked = self._shown(demonstrations, lambda shown: SftRequest(epoch, step, shown.demonstrations), what)
        return self._job.handle(asked, what)

    async def _shown(self, argument: Handle[Any], request_of: Callable[[Any], Any], what: str) -> dict[str, Any]:
        """A step on what `argument` gives; its metrics."""
        async def train(shown: Any) -> UpdateReply:
            return await self._job.submit("policy", request_of(shown), what)  # type: ignore[no-any-return]

        answer = await used(self._job, argument, train)
        self._job.journal.spent("update", answer.seconds)
        return dict(answer.metrics)

    def _trained(self, batch: list[Group], answer: UpdateReply, step: int) -> dict[str, Any]:
        """The ledger then has them as trained at `step`."""
        self._job.ledger.trained(keys_of(batch), step)
        self._job.journal.spent("update", answer.seconds)
        return {"staleness/max": max(group.staleness(step - 1) for group in batch), "version": step}
