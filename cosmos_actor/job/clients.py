"""The roles as a recipe calls them. Every method returns a Handle at once; a handle may be passed on as an argument.

The clients also keep the ledger: a trajectory is entered when it is dispatched and changes state here, nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cosmos_actor.actors.handle import Handle, settled
from cosmos_actor.actors.ledger import Key
from cosmos_actor.actors.trajectory import GenerateTask, TrajectoryGroup, in_order
from cosmos_actor.bus import BusError
from cosmos_actor.roles.messages import (
    Demonstrations,
    DemonstrationsRequest,
    Generation,
    GenerationRequest,
    PutRequest,
    ReferenceRequest,
    RestoreRequest,
    Sample,
    SampleRequest,
    SaveRequest,
    ScoreRequest,
    Scores,
    SftRequest,
    TasksRequest,
    UpdateReply,
    UpdateRequest,
)

if TYPE_CHECKING:
    from cosmos_actor.job.job import Job
    from cosmos_actor.weight_plane.version import Version

Groups = list[TrajectoryGroup]
"""On their way. Their producer holds arrays on the bulk plane until the last of these objects is dropped."""


class ShortSample(BusError):
    """The replay buffer could not give as many groups as a step needs."""


def keys_of(items: Sequence[GenerateTask | TrajectoryGroup]) -> list[Key]:
    """The ledger's keys of all trajectories of `items`."""
    return [key for item in items for key in item.keys]


class Client:
    """One role, asked through the job's fleet."""

    def __init__(self, job: Job) -> None:
        self._job = job


class Data(Client):
    """Problems and demonstrations."""

    def tasks(self, step: int, *, prompts: int | None = None, samples: int | None = None,
              split: str = "train") -> Handle[list[GenerateTask]]:
        """The prompts of `step`; the same whenever they are asked for."""
        settings = self._job.settings
        request = TasksRequest(
            step=step, prompts=prompts or settings.data.prompts_per_step,
            samples=samples or settings.rollout.samples_per_prompt, split=split, attempt=self._job.epoch)
        return self._job.call("data", request, f"prompts of step {step}", lambda answer: answer.tasks)

    def demonstrations(self, step: int) -> Handle[Demonstrations]:
        request = DemonstrationsRequest(step, self._job.settings.policy.sft_batch)
        return self._job.call("data", request, f"demonstrations of step {step}")


class Rollout(Client):
    """Sampling."""

    def wait_for_actors(self) -> None:
        """Return when `rollout.min_actors` are ready, wherever they run."""
        job = self._job
        waiting = job.fleet.wait_for_members("rollout", job.settings.rollout.min_actors, job.settings.run.deadline_s)
        job.handle(waiting, f"{job.settings.rollout.min_actors} rollout actors").resolve()

    def generate(self, tasks: Handle[list[GenerateTask]], step: int, *, greedy: bool = False) -> Handle[Groups]:
        """Samples for `tasks`, meant for step `step`, in fixed batches that any rollout may take."""
        generation = self._generate(tasks, step, self._job.weights.published, greedy)
        return self._job.handle(generation, f"samples of step {step}")

    async def _generate(self, tasks: Handle[list[GenerateTask]], step: int, version: Version, greedy: bool) -> Groups:
        """`version` is the one when the recipe asked, however long the tasks take to come."""
        job = self._job
        asked = await settled(tasks)
        job.ledger.dispatched(keys_of(asked), step, version.step)
        generations = await asyncio.gather(*(self._chunk(part, step, version, greedy) for part in job.in_parts(asked)))
        return in_order(group for answer in generations for group in answer.groups)

    async def _chunk(self, tasks: list[GenerateTask], step: int, version: Version, greedy: bool) -> Generation:
        job = self._job
        request = GenerationRequest(tasks, version_dispatch=version.step, min_ordinal=version.ordinal,
                                    greedy=greedy, weights_deadline_s=job.settings.weights.deadline_s)
        answer: Generation = await job.submit("rollout", request, f"{len(tasks)} prompts of step {step}")
        job.journal.spent("generate", answer.seconds)
        job.ledger.generated(keys_of(answer.groups), *_span(answer.groups))
        return answer


def _span(groups: Sequence[TrajectoryGroup]) -> tuple[int, int]:
    """Oldest and newest weight version of any token."""
    return (min(group.version_min or 0 for group in groups), max(group.version_max or 0 for group in groups))


class Reward(Client):
    """Judging."""

    def score(self, experience: Handle[Groups]) -> Handle[Groups]:
        """The same groups with their rewards."""
        return self._job.handle(self._score(experience), "rewards")

    def accuracy(self, experience: Handle[Groups]) -> Handle[float]:
        """The mean reward of groups that nobody will train on; the ledger drops them as evaluation."""
        return self._job.handle(self._accuracy(experience), "rewards of an evaluation")

    async def _score(self, experience: Handle[Groups]) -> Groups:
        return [group for groups, _ in await self._scored(experience) for group in groups]

    async def _accuracy(self, experience: Handle[Groups]) -> float:
        scored = await self._scored(experience)
        self._job.ledger.dropped([key for groups, _ in scored for key in keys_of(groups)], "evaluation")
        total = sum(len(groups) for groups, _ in scored)
        return sum(len(groups) * mean for groups, mean in scored) / total

    async def _scored(self, experience: Handle[Groups]) -> list[tuple[Groups, float]]:
        """(groups with rewards, their mean) of each part."""
        parts = self._job.in_parts(await settled(experience))
        answers: list[Scores] = await asyncio.gather(
            *(self._job.submit("reward", ScoreRequest(part), "rewards") for part in parts))
        return [(_with_column(part, "rewards", answer), answer.mean)
                for part, answer in zip(parts, answers, strict=True)]


def _with_column(groups: Groups, field: str, answer: Scores) -> Groups:
    return [group.with_field(field, column.values, answer.writer)
            for group, column in zip(groups, answer.columns, strict=True)]


class ReplayBuffer(Client):
    """Keeping experience until it is trained."""

    def put(self, experience: Handle[Groups], step: int) -> Handle[int]:
        """Store scored groups. Done when the buffer holds them itself, so that their producers may go."""
        return self._job.handle(self._put(experience, step), f"storing the samples of step {step}")

    def sample(self, step: int) -> list[TrajectoryGroup]:
        """The groups to train at `step`, in the order of their ids. Raises ShortSample."""
        job = self._job
        request = SampleRequest(job.epoch, job.settings.data.prompts_per_step, version=step - 1)
        answer: Sample = job.call("replay_buffer", request, f"a sample for step {step}", self._account).resolve()
        if len(answer.groups) < request.groups:
            raise ShortSample(f"step {step} needs {request.groups} groups, the replay buffer has {answer.present}; "
                              f"dropped: {answer.dropped or 'none'}", setting="run.max_staleness")
        return answer.groups

    def save(self, directory: str, step: int) -> Handle[Any]:
        request = SaveRequest(directory, self._job.epoch, step)
        return self._job.call("replay_buffer", request, f"the replay buffer's checkpoint {step}")

    def restore(self, directory: str | None, step: int) -> Handle[Any]:
        request = RestoreRequest(directory, self._job.epoch, step)
        return self._job.call("replay_buffer", request, f"the replay buffer's restore to {step}")

    async def _put(self, experience: Handle[Groups], step: int) -> int:
        epoch, got = self._job.epoch, await settled(experience)
        for part in self._job.in_parts(got):
            await self._job.submit("replay_buffer", PutRequest(epoch, step, part), f"storing samples of step {step}")
            self._job.ledger.buffered(keys_of(part))
        return len(got)

    def _account(self, answer: Sample) -> Sample:
        for reason, dropped in answer.dropped.items():
            keys = [(name, int(attempt)) for name, _, attempt in (item.rpartition("@") for item in dropped)]
            self._job.ledger.dropped(keys, reason)
        return answer


class Reference(Client):
    """Log-probs under the frozen policy."""

    def score(self, groups: list[TrajectoryGroup]) -> Handle[list[TrajectoryGroup]]:
        """The same groups with `reference_logprobs`; untouched when the run has no KL term."""
        return self._job.handle(self._score(groups), "reference log-probs")

    async def _score(self, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        job = self._job
        if job.settings.reference_count == 0:
            return groups
        parts = job.in_parts(groups)
        answers: list[Scores] = await asyncio.gather(
            *(job.submit("reference", ReferenceRequest(part), "reference log-probs") for part in parts))
        return [group for part, answer in zip(parts, answers, strict=True)
                for group in _with_column(part, "reference_logprobs", answer)]


class Policy(Client):
    """Training."""

    def sft(self, demonstrations: Handle[Demonstrations], step: int) -> Handle[dict[str, Any]]:
        """Optimiser step `step` on demonstrations; its metrics."""
        return self._job.handle(self._sft(demonstrations, step), f"SFT step {step}")

    def update(self, groups: Handle[list[TrajectoryGroup]], step: int) -> Handle[dict[str, Any]]:
        """Optimiser step `step` on scored groups; its metrics. The ledger then has them as trained at `step`."""
        return self._job.handle(self._update(groups, step), f"policy update {step}")

    def save(self, directory: str, step: int) -> Handle[Any]:
        request = SaveRequest(directory, self._job.epoch, step)
        return self._job.call("policy", request, f"the policy's checkpoint {step}")

    def restore(self, directory: str | None, step: int) -> Handle[Any]:
        request = RestoreRequest(directory, self._job.epoch, step)
        return self._job.call("policy", request, f"the policy's restore to step {step}")

    async def _sft(self, demonstrations: Handle[Demonstrations], step: int) -> dict[str, Any]:
        epoch, shown = self._job.epoch, (await settled(demonstrations)).demonstrations
        answer: UpdateReply = await self._job.submit("policy", SftRequest(epoch, step, shown), f"SFT step {step}")
        self._job.journal.spent("update", answer.seconds)
        return dict(answer.metrics)

    async def _update(self, groups: Handle[list[TrajectoryGroup]], step: int) -> dict[str, Any]:
        job, epoch = self._job, self._job.epoch
        batch = await settled(groups)
        staleness = max(group.staleness(step - 1) for group in batch)
        answer: UpdateReply = await job.submit("policy", UpdateRequest(epoch, step, batch), f"policy update {step}")
        job.ledger.trained(keys_of(batch), step)
        job.journal.spent("update", answer.seconds)
        return {**answer.metrics, "staleness/max": staleness, "version": step}
