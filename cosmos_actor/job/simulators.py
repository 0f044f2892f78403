"""Simulators as a recipe calls them: what they are, the fragments they give, and the record of their episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_actor.actors.experience import Group, Task
from cosmos_actor.actors.handle import Handle
from cosmos_actor.actors.json_lines import JsonLinesWriter, read_json_lines, truncate_after_step
from cosmos_actor.actors.messages import Member
from cosmos_actor.bus import BusError, Link
from cosmos_actor.job.clients import Producer
from cosmos_actor.job.intake import Experience
from cosmos_actor.job.sinks import make_sinks
from cosmos_actor.job.videos import prune, write_videos
from cosmos_actor.roles.control_messages import (
    DESCRIPTION_TOPIC,
    CollectRequest,
    DescribeRequest,
    Evaluated,
    EvaluateRequest,
    SimulatorEvent,
)
from cosmos_actor.roles.evaluator import DONE
from cosmos_actor.roles.unit_source import trials
from cosmos_actor.simulator_bridge.contract import SUCCESS, UNKNOWN, Description, WorkUnit

if TYPE_CHECKING:
    from cosmos_actor.job.job import Job
    from cosmos_actor.weight_plane.version import Version

EVALUATION = "eval"
"""`phase` of an episode that nobody trained on."""
ACTING = ("rollout", "reference")
"""Roles that make a network of what the simulators are, and can be replaced at any time."""
SAY_S = 2.0
"""Of the deadline, for the rollout to say that nobody has attached: that is more than that the time is over."""


class Simulators(Producer):
    """Guarantee: an episode is in episodes.jsonl once, under the step that trained on its end; then sinks have it."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._description: Description | None = None
        self._episodes = JsonLinesWriter(job.paths.episodes)
        self._sinks = make_sinks(job.settings, job.paths.root, job.tell)
        self._lines_are_ours = False
        """Whether what episodes.jsonl has after the latest checkpoint is of this controller."""
        job.bus.serve_event(SimulatorEvent, self._on_event)
        job.fleet.on_joined(self._on_joined)

    def describe(self) -> Description:
        """What the run's simulators are, which is what the first that attaches is; who acts or is asked hears of it."""
        if self._description is None:
            deadline_s = self._job.settings.run.deadline_s
            request = DescribeRequest(max(deadline_s - SAY_S, deadline_s / 2))
            self._job.call("rollout", request, "the first simulator to attach", self._known).resolve()
        assert self._description is not None
        return self._description

    def collect(self, tasks: Handle[list[Task]], step: int) -> Experience:
        """Fragments for `tasks`, meant for step `step`."""
        deadline_s = self._job.settings.weights.deadline_s

        def request_of(wanted: list[Task], version: Version) -> CollectRequest:
            return CollectRequest(wanted, version_dispatch=version.step,  # type: ignore[arg-type]
                                  min_ordinal=version.ordinal, weights_deadline_s=deadline_s)

        return self._experience(tasks, step, request_of, "fragments", "fragments")

    def episodes(self, batch: Sequence[Group], step: int) -> dict[str, float]:
        """Write down the episodes that ended in `batch`; what they say on average, empty where none ended."""
        ended = [episode for group in batch for episode in group.task["episodes"]]
        for episode in ended:
            self._write({"step": step, **episode})
        metrics = {"env_steps": float(sum(group.task["env_steps"] for group in batch)), "episodes": float(len(ended)),
                   **{f"sinks/{name}": float(count) for name, count in self._sinks.statistics().items()}}
        if ended:
            metrics["episode/return"] = float(np.mean([episode["return"] for episode in ended]))
            metrics["episode/length"] = float(np.mean([episode["length"] for episode in ended]))
        judged = [episode["success"] for episode in ended if episode["success"] != UNKNOWN]
        if judged:
            metrics["episode/success"] = float(np.mean(judged))
        return metrics

    def evaluate(self) -> None:
        """How well the newest weights do, greedily, in `sim.eval_trials` episodes of each task: a line of its own.

        An error of a simulator is no failure of the policy: it is counted beside the episodes that came to their ends.
        """
        job = self._job
        settings, version = job.settings, job.weights.published
        description = self.describe()
        units = trials(description, settings.sim.tasks, settings.sim.eval_trials, settings.run.seed)
        what = f"{len(units)} episodes of the evaluation after step {version.step}"
        records, videos = job.handle(self._evaluated(units, version, what), what).resolve()
        named = self._keep_videos(version.step, records, videos)
        said = {task.name: {"instruction": task.instruction} for task in description.tasks if task.instruction}
        for record in records:
            self._write({"step": version.step, "phase": EVALUATION, **record,
                         **said.get(record["task"], {}), **named.get(record["unit"], {})})
        job.journal.evaluation(version.step, summary(records))

    def _keep_videos(self, step: int, records: Sequence[Mapping[str, Any]],
                     videos: Mapping[str, bytes]) -> dict[str, dict[str, str]]:
        """Unit -> `{"video": path}`. A disk that is full is an event and no end of the run."""
        paths, named = self._job.paths, {}
        try:
            for unit, path in write_videos(paths.videos, step, records, videos):
                named[unit] = {"video": path.relative_to(paths.root).as_posix()}
            prune(paths.videos, step, self._job.settings.sim.keep_videos)
        except OSError as error:
            self._job.tell("simulator_not_filmed", text=f"videos can not be written: {error}")
        return named

    async def _evaluated(self, units: list[WorkUnit], version: Version,
                         what: str) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
        """Spread over the rollouts that there are; a part whose rollout dies is done by another."""
        job = self._job
        size = -(-len(units) // max(1, len(job.fleet.links("rollout"))))
        deadline_s = job.settings.weights.deadline_s
        parts = [EvaluateRequest(units[at:at + size], version.step, version.ordinal, deadline_s)
                 for at in range(0, len(units), size)]
        answers: list[Evaluated] = await asyncio.gather(*(job.submit("rollout", part, what) for part in parts))
        videos = [await self._fetched(answer.videos) for answer in answers]
        return ([record for answer in answers for record in answer.records],
                {unit: video for of_one in videos for unit, video in of_one.items()})

    async def _fetched(self, videos: Mapping[str, Any]) -> dict[str, bytes]:
        """Their bytes: a large one has come as a reference. One whose rollout has died is an event."""
        reader, found = self._job.bus.bulk_reader, {}
        try:
            for unit, video in videos.items():
                if not isinstance(video, np.ndarray) and reader is not None:
                    video = await reader.fetch(video, deadline_s=self._job.settings.run.deadline_s)
                found[unit] = video.tobytes()
        except BusError as error:
            self._job.tell("simulator_not_filmed", text=f"videos did not come: {error}")
        return found

    def _write(self, record: dict[str, Any]) -> None:
        self._episodes.append(record)
        self._sinks.offer(record)

    def settle(self) -> None:
        """A checkpoint is about to be written; see `sinks`."""
        self._sinks.settle()

    def roll_back(self, step: int) -> None:
        """Forget the episodes after `step`. Sinks can not, and are not given them again by this controller."""
        path = self._job.paths.episodes
        if self._lines_are_ours and self._job.settings.sim.sinks:
            self._sinks.cut_off([record for record in read_json_lines(path) if record["step"] > step])
        self._lines_are_ours = True
        truncate_after_step(path, step)

    def close(self) -> None:
        self._episodes.close()
        self._sinks.close()

    def _known(self, description: Description) -> Any:
        self._description = description
        for role in ACTING:
            for link in self._job.fleet.links(role).values():
                link.publish_state(topic=DESCRIPTION_TOPIC, message=description)
        return description

    def _on_joined(self, member: Member, link: Link) -> None:
        if member.role in ACTING and self._description is not None:
            link.publish_state(topic=DESCRIPTION_TOPIC, message=self._description)

    async def _on_event(self, event: SimulatorEvent, link: Link) -> None:
        self._job.tell(f"simulator_{event.what}", rollout=link.peer.actor, **event.facts)


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What an evaluation says: means over the episodes that came to their ends, and how many did not."""
    done = [record for record in records if record["outcome"] == DONE]
    metrics = {"eval/episodes": float(len(done)), "eval/errors": float(len(records) - len(done))}
    if done:
        metrics["eval/return"] = float(np.mean([record["return"] for record in done]))
        metrics["eval/length"] = float(np.mean([record["length"] for record in done]))
    judged = [record["success"] == SUCCESS for record in done if record["success"] != UNKNOWN]
    if judged:
        metrics["eval/accuracy"] = float(np.mean(judged))
    return metrics
