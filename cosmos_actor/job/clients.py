"""The roles as a recipe calls them. Every method returns a Handle at once; a handle may be passed on as an argument.

The clients also keep the ledger: a trajectory is entered when it is dispatched and changes state here, nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cosmos_actor.actors.dead_letters import Poison
from cosmos_actor.actors.experience import Group, Task
from cosmos_actor.actors.handle import Handle, settled
from cosmos_actor.bus import DeadlineExceeded
from cosmos_actor.job.intake import (
    ArraysGone,
    Experience,
    Flight,
    Groups,
    Part,
    Refused,
    ShortSample,
    keys_of,
    parts_of,
    used,
)
from cosmos_actor.job.weights import UnprovenWeights
from cosmos_actor.roles.control_messages import ShownMoments, ShownRequest
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
    TasksRequest,
)
from cosmos_actor.simulator_bridge.contract import Description

if TYPE_CHECKING:
    from cosmos_actor.job.job import Job
    from cosmos_actor.weight_plane.version import Version

QUARANTINED, TOO_LATE, UNPROVEN = "quarantined", "no answer in time", "unproven weights"
"""Why the ledger drops groups that killed their consumers, that nobody answered within `run.deadline_s`, or that were
not made with weights that were published."""


class Client:
    """One role, asked through the job's fleet."""

    def __init__(self, job: Job) -> None:
        self._job = job


class Data(Client):
    """Problems and demonstrations."""

    def tasks(self, step: int, *, prompts: int | None = None, samples: int | None = None,
              split: str = "train") -> Handle[list[Task]]:
        """The prompts of `step`; the same whenever they are asked for."""
        settings, limits = self._job.settings, self._job.intake.limiter.limits
        request = TasksRequest(
            step=step, prompts=prompts or limits.groups_asked, samples=samples or settings.rollout.samples_per_prompt,
            split=split, attempt=self._job.epoch)
        return self._job.call("data", request, f"prompts of step {step}", lambda answer: answer.tasks)

    def replacements(self, step: int, first: int, count: int) -> Handle[list[Task]]:
        """Prompts in the place of groups of `step` that will not come: numbers `first`.. of its replacements."""
        request = TasksRequest(step=step, prompts=first + count, samples=self._job.settings.rollout.samples_per_prompt,
                               split="replacement", attempt=self._job.epoch)
        what = f"{count} replacements for step {step}"
        return self._job.call("data", request, what, lambda answer: answer.tasks[first:])

    def shown(self, step: int, description: Description) -> Handle[ShownMoments]:
        """Moments of demonstrations of these simulators."""
        request = ShownRequest(step, self._job.settings.policy.sft_batch, description)
        return self._job.call("data", request, f"demonstrations of step {step}")

    def demonstrations(self, step: int) -> Handle[Demonstrations]:
        request = DemonstrationsRequest(step, self._job.settings.policy.sft_batch)
        return self._job.call("data", request, f"demonstrations of step {step}")


class Producer(Client):
    """Rollouts, whatever they make experience from."""

    def _experience(self, tasks: Handle[list[Task]], step: int, request_of: Callable[[list[Task], Version], Any],
                    asked: str, what: str) -> Experience:
        """What comes of `tasks`, meant for step `step`, in fixed batches that any rollout may take.

        `asked` and `what` name tasks and what comes of them, for `why`.
        """
        return Experience(self._job, self._parts(tasks, step, self._job.weights.published, request_of, asked),
                          f"{what} of step {step}")

    async def _parts(self, tasks: Handle[list[Task]], step: int, version: Version,
                     request_of: Callable[[list[Task], Version], Any], asked: str) -> list[Part]:
        """`version` is the one when the recipe asked, however long the tasks take to come."""
        job = self._job
        wanted = await settled(tasks)
        job.ledger.dispatched(keys_of(wanted), step, version.step)
        return [self._part(batch, tasks, version, request_of, f"{len(batch)} {asked} of step {step}")
                for batch in job.in_parts(wanted)]

    def _part(self, batch: list[Task], tasks: Handle[list[Task]], version: Version,
              request_of: Callable[[list[Task], Version], Any], what: str) -> Part:
        flight = Flight(batch, version.step)

        async def ask(all_tasks: list[Task]) -> Generation:
            wanted = [task for task in all_tasks if task.group_id in flight.names]
            return await flight.ask(self._job, "rollout", request_of(wanted, version), what)  # type: ignore[no-any-return]

        return Part(self._job, flight, lambda: self._chunk(flight, used(self._job, tasks, ask)))

    async def _chunk(self, flight: Flight, sampling: Coroutine[Any, Any, Generation]) -> Groups:
        job = self._job
        if flight.sampled and not flight.refused:
            job.ledger.asked_again(flight.keys)
            flight.sampled = False
        answer = await sampling
        job.weights.vouch(answer)
        job.journal.spent("generate", answer.seconds)
        job.ledger.generated(keys_of(answer.groups), *_span(answer.groups))
        flight.sampled = True
        return answer.groups


class Rollout(Producer):
    """Sampling."""

    def wait_for_actors(self) -> None:
        """Return when `rollout.min_actors` are ready, wherever they run."""
        job = self._job
        waiting = job.fleet.wait_for_members("rollout", job.settings.rollout.min_actors, job.settings.run.deadline_s)
        job.handle(waiting, f"{job.settings.rollout.min_actors} rollout actors").resolve()

    def generate(self, tasks: Handle[list[Task]], step: int, *, greedy: bool = False) -> Experience:
        """Samples for `tasks`, meant for step `step`."""
        deadline_s = self._job.settings.weights.deadline_s

        def request_of(wanted: list[Task], version: Version) -> GenerationRequest:
            return GenerationRequest(wanted, version_dispatch=version.step,  # type: ignore[arg-type]
                                     min_ordinal=version.ordinal, greedy=greedy, weights_deadline_s=deadline_s)

        return self._experience(tasks, step, request_of, "prompts", "samples")


def _span(groups: Sequence[Group]) -> tuple[int, int]:
    """Oldest and newest weight version of any token."""
    return (min(group.version_min or 0 for group in groups), max(group.version_max or 0 for group in groups))


class Reward(Client):
    """Judging."""

    def score(self, experience: Handle[Groups]) -> Experience:
        """The same groups with their rewards."""
        return Experience(self._job, self._parts(experience), "rewards")

    def accuracy(self, experience: Handle[Groups]) -> Handle[float]:
        """The mean reward of groups that nobody will train on; the ledger drops them as evaluation."""
        return self._job.handle(self._accuracy(experience), "rewards of an evaluation")

    async def _parts(self, experience: Handle[Groups]) -> list[Part]:
        return [Part(self._job, part.flight, partial(self._scored, part))
                for part in await parts_of(self._job, experience)]

    async def _scored(self, part: Part) -> Groups:
        return (await self._judged(part))[0]

    async def _judged(self, part: Part) -> tuple[Groups, float]:
        """(groups with rewards, their mean)."""
        groups = await part.groups()
        while True:
            try:
                answer: Scores = await part.flight.ask(self._job, "reward", ScoreRequest(groups), "rewards")
                return _with_column(groups, "rewards", answer), answer.mean
            except ArraysGone as gone:
                groups = await part.anew(groups, gone)

    async def _accuracy(self, experience: Handle[Groups]) -> float:
        """Of the problems whose answers could be judged. Raises Poison or UnprovenWeights when there is none."""
        parts = await parts_of(self._job, experience)
        found = await asyncio.gather(*(self._judged(part) for part in parts), return_exceptions=True)
        judged: list[tuple[int, float]] = []
        for part, outcome in zip(parts, found, strict=True):
            if isinstance(outcome, BaseException):
                if not isinstance(outcome, (Poison, UnprovenWeights)):
                    raise outcome
                reason = QUARANTINED if isinstance(outcome, Poison) else UNPROVEN
                self._job.ledger.dropped(part.flight.keys, reason)
            else:
                self._job.ledger.dropped(keys_of(outcome[0]), "evaluation")
                judged.append((len(outcome[0]), outcome[1]))
        total = sum(count for count, _ in judged)
        if total == 0:
            raise next(outcome for outcome in found if isinstance(outcome, BaseException))
        return sum(count * mean for count, mean in judged) / total


def _with_column(groups: Groups, field: str, answer: Scores) -> Groups:
    return [group.with_field(field, column.values, answer.writer)
            for group, column in zip(groups, answer.columns, strict=True)]


class ReplayBuffer(Client):
    """Keeping experience until it is trained."""

    def put(self, experience: Handle[Groups], step: int, *, opened: bool = False) -> Handle[int]:
        """Store scored groups, each part as it comes; how many were stored when all have come or were given up.

        Then the buffer holds them itself, so that their producers may go. `opened`: the limiter knows of them already.
        """
        return self._job.handle(self._put(experience, step, opened), f"storing the samples of step {step}")

    def sample(self, step: int) -> list[Group]:
        """The groups to train at `step`, in the order of their ids, once the limiter lets it go. Raises ShortSample."""
        job = self._job
        while True:
            wanted = job.granted(step)
            request = SampleRequest(job.epoch, wanted, version=step - 1)
            answer: Sample = job.call("replay_buffer", request, f"a sample for step {step}", self._account).resolve()
            if len(answer.groups) == wanted:
                return answer.groups
            if not answer.dropped:
                raise ShortSample(f"step {step} needs {wanted} groups, the replay buffer has {answer.present}",
                                  setting="run.max_staleness")

    def save(self, directory: str, step: int) -> Handle[Any]:
        request = SaveRequest(directory, self._job.epoch, step)
        return self._job.call("replay_buffer", request, f"the replay buffer's checkpoint {step}")

    def restore(self, directory: str | None, step: int) -> Handle[Any]:
        request = RestoreRequest(directory, self._job.epoch, step)
        return self._job.call("replay_buffer", request, f"the replay buffer's restore to {step}")

    async def _put(self, experience: Handle[Groups], step: int, opened: bool) -> int:
        job, epoch = self._job, self._job.epoch
        if not opened:
            job.intake.opened(step)
        try:
            parts = await parts_of(job, experience)
            job.intake.dispatched(step, parts)
            return sum(await asyncio.gather(*(self._store(part, epoch, step) for part in parts)))
        except Exception as error:  # whoever waits for these samples is to hear of it, whatever it is
            job.intake.failed(error)
            raise

    async def _store(self, part: Part, epoch: int, step: int) -> int:
        """How many groups of the part came to be stored."""
        job, flight = self._job, part.flight
        groups = await self._come(flight, part.groups())
        while groups:
            flight.storing = True
            try:
                await job.submit("replay_buffer", PutRequest(epoch, step, groups), f"storing samples of step {step}")
                break
            except ArraysGone as gone:
                flight.storing = False
                groups = await self._come(flight, part.anew(groups, gone))
        if groups:
            flight.check()
            job.ledger.buffered(flight.keys)
            job.intake.stored(flight)
        return len(groups)

    async def _come(self, flight: Flight, groups: Coroutine[Any, Any, Groups]) -> Groups:
        """The groups of a part; none when they were given up, and the ledger then knows why."""
        job = self._job
        try:
            come = await groups
            flight.check()
            return come
        except Refused:
            return []
        except Poison:
            job.intake.lost(flight, QUARANTINED)
            return []
        except UnprovenWeights as unproven:
            job.tell("unproven_weights", groups=flight.names, reason=unproven.text)
            job.intake.lost(flight, UNPROVEN)
            return []
        except DeadlineExceeded:
            if job.settings.limiter.straggler_s <= 0:
                raise
            job.intake.lost(flight, TOO_LATE)
            return []

    def _account(self, answer: Sample) -> Sample:
        for reason, dropped in answer.dropped.items():
            keys = [(name, int(attempt)) for name, _, attempt in (item.rpartition("@") for item in dropped)]
            self._job.ledger.dropped(keys, reason)
            self._job.intake.gone(sorted({name.rpartition("/")[0] for name, _ in keys}), "stale")
        self._job.intake.limiter.taken([group.group_id for group in answer.groups])
        return answer


class Reference(Client):
    """Log-probs under the frozen policy."""

    def score(self, groups: list[Group]) -> Handle[list[Group]]:
        """The same groups with `reference_logprobs`; untouched when the run has no KL term."""
        again = partial(self._score, groups)
        return self._job.handle(again(), "reference log-probs", again=again)

    async def _score(self, groups: list[Group]) -> list[Group]:
        job = self._job
        if job.settings.reference_count == 0:
            return groups
        found = await asyncio.gather(*(self._scored(part) for part in job.in_parts(groups)))
        scored = [group for part in found for group in part]
        if not scored:
            raise ShortSample("no group of the step is left that the reference could score", setting="reference.count")
        return scored

    async def _scored(self, groups: Groups) -> Groups:
        """The groups with their log-probs; none when they killed the reference, and the step goes on without them."""
        job = self._job
        try:
            answer: Scores = await job.submit("reference", ReferenceRequest(groups), "reference log-probs")
        except Poison:
            job.ledger.dropped(keys_of(groups), QUARANTINED)
            return []
        return _with_column(groups, "reference_logprobs", answer)
