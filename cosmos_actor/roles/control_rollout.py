"""Rollout for control: drives the simulators that attach to it with the newest weights it holds."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_actor.actors.context import Context
from cosmos_actor.actors.fragment import CollectTask, Fragment
from cosmos_actor.actors.role import follows, handles
from cosmos_actor.bus.errors import DeadlineExceeded
from cosmos_actor.roles.acting import Acted, BatchedActing, Observations
from cosmos_actor.roles.collector import CollectLimits, Collector
from cosmos_actor.roles.control_messages import (
    DESCRIPTION_TOPIC,
    CollectRequest,
    DescribeRequest,
    Evaluated,
    EvaluateRequest,
    SimulatorEvent,
)
from cosmos_actor.roles.evaluator import Evaluator
from cosmos_actor.roles.films import Films, cameras_of, missing
from cosmos_actor.roles.judging import bootstraps
from cosmos_actor.roles.messages import Generation
from cosmos_actor.roles.unit_source import load_source
from cosmos_actor.roles.weights_holder import WeightsHolder
from cosmos_actor.simulator_bridge.contract import Description
from cosmos_actor.simulator_bridge.gateway import AttachedSimulator, Gateway
from cosmos_actor.simulator_bridge.leases import LeaseTable
from cosmos_actor.simulator_bridge.messages import Attach
from cosmos_actor.simulator_bridge.plugins import SimulatorName
from cosmos_actor.trainer.instructions import Instructions, observations_of
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.swap import WeightsHeld

SHARE = 0.9
"""Of the deadline of whoever asks: with all of it, its line would be that the time is over, and not why."""


class ControlRolloutRole(WeightsHolder):
    """Every step says which version of the weights chose its action; one request is collected at a time."""

    name = "rollout"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.hold_nothing()
        self.description: Description | None = None
        self.collector: Collector | None = None
        self.made = asyncio.Event()
        self.someone = asyncio.Event()
        self.one_at_a_time = asyncio.Lock()
        self.swapping = threading.Lock()
        self.listened_to = False
        """Whether there is a controller to hear of simulators; it asks first."""
        self.telling: set[asyncio.Task[None]] = set()
        gateway: Gateway = context.simulators
        gateway.admit_by(self._refusal)
        gateway.on_attached(self._attached)
        gateway.on_gone(self._gone)

    async def ready_for_weights(self) -> None:
        with self.context.waiting("what the simulators are", "controller"):
            await self.made.wait()

    # ---- what the simulators are

    @handles(DescribeRequest)
    async def describe(self, request: DescribeRequest) -> Description:
        """Raises DeadlineExceeded when nobody attaches in time."""
        gateway: Gateway = self.context.simulators
        if not self.listened_to:
            self.listened_to = True
            for simulator in gateway.present:
                self._tell_attached(simulator)
        with self.context.waiting("the first simulator to attach", "simulator"):
            try:
                await asyncio.wait_for(self.someone.wait(), request.deadline_s)
            except asyncio.TimeoutError as error:
                raise DeadlineExceeded(
                    f"no simulator of {self.context.settings.sim.kind or 'any kind'} has attached to "
                    f"{self.context.identity.actor} within {request.deadline_s:g} s", setting="sim.count") from error
        return self.description or gateway.present[0].description

    @follows(DESCRIPTION_TOPIC)
    async def on_description(self, description: Description) -> None:
        """From now on the run is about these simulators; another kind is refused."""
        if self.description is None:
            self.description = description
            await self.context.compute("build", self._build, description)
            self._make_collector(description)
            self._say_what_is_not_filmed(description)
            self.made.set()

    def _build(self, description: Description) -> None:
        from cosmos_actor.roles.control_engine import ControlEngine

        settings = self.context.settings.control
        kind = settings.network.kind
        self.instructions = Instructions(description, kind=kind)
        self.engine = ControlEngine(settings, observations_of(description, kind=kind), description.action)

    def _make_collector(self, description: Description) -> None:
        settings, identity = self.context.settings.sim, self.context.identity
        self.collector = Collector(
            self.context.simulators, BatchedActing(self._act, settings.max_wait_ms / 1000),
            LeaseTable(attempts=settings.attempts, lease_s=settings.lease_s),
            load_source(self.context.settings, description), self.engine.noise,
            CollectLimits(settings.step_s, settings.reset_s, settings.most_given_up), self.context.clock.monotonic,
            functools.partial(self._tell, "failed"), prefix=f"{identity.actor}.{identity.incarnation[-6:]}",
            told=self.instructions.told)

    def _say_what_is_not_filmed(self, description: Description) -> None:
        settings = self.context.settings
        wanted = settings.run.eval_every and (settings.sim.videos or settings.sim.failed_videos)
        if wanted and cameras_of(description) and (problem := missing()):
            self._tell("not_filmed", {"text": f"evaluations have no videos (sim.videos): {problem}"})

    def _refusal(self, actor: str, offer: Attach) -> str | None:
        """Why this simulator may not work for the run, or None."""
        wanted = self.context.settings.sim
        offered = offer.description
        problem = None
        kind = str(SimulatorName.parse(wanted.kind, wanted.options)) if wanted.kind else ""
        if kind and str(SimulatorName.parse(offered.simulator)) != kind:
            problem = f"this run is about {kind} (sim.kind, sim.options), not about {offered.simulator}"
        elif wanted.embodiment and offered.embodiment != wanted.embodiment:
            problem = (f"{offered.simulator} has embodiment {offered.embodiment[:12] or 'none'}, the run asks for "
                       f"{wanted.embodiment[:12]} (sim.embodiment)")
        elif self.description is not None:
            problem = difference(self.description, offered)
        if problem:
            self._tell("refused", {"simulator": actor, "text": problem})
        return problem

    def _attached(self, simulator: AttachedSimulator) -> None:
        self.someone.set()
        if self.listened_to:
            self._tell_attached(simulator)

    def _tell_attached(self, simulator: AttachedSimulator) -> None:
        self._tell("attached", {"simulator": simulator.name, "kind": simulator.description.simulator,
                                "envs": len(simulator.slots), "host": simulator.offer.host,
                                "pid": simulator.offer.pid, "python": simulator.offer.python})

    def _gone(self, simulator: AttachedSimulator) -> None:
        self._tell("gone", {"simulator": simulator.name, "text": simulator.gone})

    def _tell(self, what: str, facts: dict[str, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self.context.emit(SimulatorEvent(what, facts)))
        self.telling.add(task)
        task.add_done_callback(self.telling.discard)

    # ---- fragments

    @handles(CollectRequest)
    async def collect(self, request: CollectRequest) -> Generation:
        await self.wait_for_version(request.version_dispatch, request.min_ordinal, request.weights_deadline_s)
        assert self.collector is not None
        async with self.one_at_a_time:
            begun = self.context.clock.monotonic()
            with self.context.waiting(f"{len(request.tasks)} fragments", "simulator"):
                found = await self._collected(request.tasks)
            groups = await self.context.compute("values", self._fragments, request, found)
        return Generation(groups, self.context.clock.monotonic() - begun,
                          sum(group.token_count for group in groups))

    @handles(EvaluateRequest)
    async def evaluate(self, request: EvaluateRequest) -> Evaluated:
        """Episodes of training that simulators are in are begun anew afterwards."""
        await self.wait_for_version(request.version, request.min_ordinal, request.weights_deadline_s)
        assert self.collector is not None and self.description is not None
        settings = self.context.settings.sim
        async with self.one_at_a_time:
            begun = self.context.clock.monotonic()
            self.collector.interrupt()
            films = Films(self.description, settings.videos, settings.failed_videos)
            evaluator = Evaluator(self.context.simulators, self._act_greedily, self.collector.limits,
                                  settings.attempts, self.context.clock.monotonic,
                                  functools.partial(self._tell, "failed"), self.instructions.told, films)
            try:
                with self.context.waiting(f"{len(request.units)} episodes of an evaluation", "simulator"):
                    records = await self._in_time(evaluator.run(request.units), f"run {len(request.units)} episodes")
                with self.context.waiting("their videos", "the encoder"):
                    videos = await asyncio.to_thread(films.finish)
            finally:
                films.close()
        if films.problem:
            self._tell("not_filmed", {"text": films.problem})
        return Evaluated(records, self.context.clock.monotonic() - begun,
                         {unit: np.frombuffer(video, np.uint8) for unit, video in videos.items()})

    async def _collected(self, tasks: Sequence[CollectTask]) -> list[dict[str, Any]]:
        assert self.collector is not None
        return await self._in_time(self.collector.collect(tasks), f"collected {len(tasks)} fragments")

    async def _in_time(self, work: Coroutine[Any, Any, list[dict[str, Any]]], what: str) -> list[dict[str, Any]]:
        """Raises DeadlineExceeded before the asker does, and says who is attached."""
        deadline_s = SHARE * self.context.settings.run.deadline_s
        try:
            return await asyncio.wait_for(work, deadline_s)
        except asyncio.TimeoutError as error:
            present = self.context.simulators.present
            attached = ", ".join(str(simulator) for simulator in present) or "none"
            raise DeadlineExceeded(
                f"{self.context.identity.actor} has not {what} within {deadline_s:g} s; simulators attached to it: "
                f"{attached}", setting="sim.count" if not present else "run.deadline_s") from error

    def _fragments(self, request: CollectRequest, found: Sequence[dict[str, Any]]) -> list[Fragment]:
        """With the values of what follows the boundaries, all of them in one pass; a critic of its own does that."""
        columns = [item["columns"] for item in found]
        if self.context.settings.critic_count:
            columns = [{name: column for name, column in of_one.items() if name != "values"} for of_one in columns]
        else:
            follows = bootstraps([of_one["boundary"] for of_one in columns], [of_one["after"] for of_one in columns],
                                 self.engine.values)
            columns = [{**of_one, "bootstrap": column} for of_one, column in zip(columns, follows, strict=True)]
        return [self._fragment(task, item, of_one, request.version_dispatch)
                for task, item, of_one in zip(request.tasks, found, columns, strict=True)]

    def _fragment(self, task: CollectTask, item: dict[str, Any], columns: dict[str, Any], version: int) -> Fragment:
        writer = self.context.identity.actor
        facts = {"simulator": item["simulator"], "actor": item["actor"], "episodes": item["episodes"],
                 "env_steps": item["env_steps"]}
        return Fragment(group_id=task.group_id, attempt=task.attempt, task=facts, version_dispatch=version,
                        written_by={name: writer for name in ("values", "bootstrap") if name in columns}, **columns)

    async def _act(self, observations: Observations, noise: np.ndarray) -> Acted:
        if self.engine.quick:  # the way to the worker and back would take longer
            self.context.tick()
            return self._acted(observations, noise)
        return await self.context.compute("act", self._acted, observations, noise)  # type: ignore[no-any-return]

    async def _act_greedily(self, observations: Observations, keys: Sequence[Sequence[int]]) -> Acted:
        return await self.context.compute("act", self._acted, observations,  # type: ignore[no-any-return]
                                          self.engine.start(keys))

    def _acted(self, observations: Observations, noise: np.ndarray | None) -> Acted:
        """The version is the one that chose: nothing is swapped meanwhile."""
        with self.swapping:
            assert self.held is not None
            actions, logprobs, values = self.engine.act(observations, noise)
            return Acted(actions, logprobs, values, self.held.version.step, self.engine.commands(actions))

    def _swap(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> WeightsHeld:
        with self.swapping:
            return super()._swap(manifest, tensors)


def difference(ours: Description, theirs: Description) -> str | None:
    """In what two installations of a simulator differ so that one policy can not serve both, or None."""
    for name in ("simulator", "observations", "action", "embodiment"):
        if getattr(ours, name) != getattr(theirs, name):
            return (f"its `{name}` is {getattr(theirs, name)}, the run's is {getattr(ours, name)}: one policy can not "
                    "serve both")
    missing = {task.name for task in ours.tasks} - {task.name for task in theirs.tasks}
    return f"it lacks the tasks {', '.join(sorted(missing))}" if missing else None
