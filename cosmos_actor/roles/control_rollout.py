"""Rollout for control: drives the simulators that attach to it with the newest weights it holds."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_actor.actors.context import Context
from cosmos_actor.actors.errors import BadValue, UserError
from cosmos_actor.actors.fragment import CollectTask, Fragment
from cosmos_actor.actors.role import follows, handles
from cosmos_actor.bus.errors import DeadlineExceeded
from cosmos_actor.roles.acting import Acted, BatchedActing, Observations
from cosmos_actor.roles.collector import CollectLimits
from cosmos_actor.roles.control_messages import (
    DESCRIPTION_TOPIC,
    CollectRequest,
    DescribeRequest,
    Evaluated,
    EvaluateRequest,
    SimulatorEvent,
)
from cosmos_actor.roles.driver import Driver
from cosmos_actor.roles.evaluator import Evaluator
from cosmos_actor.roles.films import Films, cameras_of, missing
from cosmos_actor.roles.judging import bootstraps
from cosmos_actor.roles.messages import Generation
from cosmos_actor.roles.plugins import DRIVERS, SOURCES
from cosmos_actor.roles.shared_or_alone import SharedOrAlone
from cosmos_actor.roles.unit_source import make_source
from cosmos_actor.roles.weights_holder import WeightsHolder
from cosmos_actor.simulator_bridge.contract import Description, WorkUnit
from cosmos_actor.simulator_bridge.gateway import AttachedSimulator, Gateway
from cosmos_actor.simulator_bridge.leases import LeaseTable
from cosmos_actor.simulator_bridge.messages import Attach
from cosmos_actor.simulator_bridge.plugins import SimulatorName
from cosmos_actor.trainer.instructions import Instructions, observations_of
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.swap import WeightsHeld

SHARE = 0.9
"""Of the deadline of whoever asks: with all of it, its line would be that the time is over, and not why."""

Found = tuple[float, list[dict[str, Any]]]
"""When it had the simulators, by the actor's clock, and what came of it."""


class ControlRolloutRole(WeightsHolder):
    """Every step says which version of the weights chose its action; while an evaluation runs, nothing is collected."""

    name = "rollout"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.hold_nothing()
        settings = context.settings.sim
        self.plug_ins = SOURCES.load(settings.source), DRIVERS.load(settings.driver)
        self.limits = CollectLimits(settings.step_s, settings.reset_s, settings.most_given_up)
        self.description: Description | None = None
        self.driver: Driver | None = None
        self.made = asyncio.Event()
        self.unfit: UserError | None = None
        """Why there is no driver."""
        self.someone = asyncio.Event()
        self.simulators_for = SharedOrAlone()
        """Requests for fragments together, or an evaluation."""
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
        if self.unfit is not None:
            raise self.unfit

    # ---- what the simulators are

    @handles(DescribeRequest)
    async def describe(self, request: DescribeRequest) -> Description:
        """Raises DeadlineExceeded when nobody attaches in time; BadValue or UnknownName when nothing can drive them."""
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
        description = self.description or gateway.present[0].description
        self._make_driver(description)  # now, so that whoever asks hears of it
        return description

    @follows(DESCRIPTION_TOPIC)
    async def on_description(self, description: Description) -> None:
        """From now on the run is about these simulators; another kind is refused."""
        if self.description is None:
            self.description = description
            await self.context.compute("build", self._build, description)
            try:
                self._make_driver(description)
            except UserError as error:  # nobody hears what a follower raises: it is the answer to the next weights
                self.unfit = error
            self._say_what_is_not_filmed(description)
            self.made.set()

    def _build(self, description: Description) -> None:
        from cosmos_actor.roles.control_engine import ControlEngine

        settings = self.context.settings.control
        kind = settings.network.kind
        self.instructions = Instructions(description, kind=kind)
        self.engine = ControlEngine(settings, observations_of(description, kind=kind), description.action)

    def _make_driver(self, description: Description) -> None:
        """Once; the network that it asks is made later. Raises BadValue, or what `make_source` does."""
        if self.driver is not None:
            return
        settings, identity = self.context.settings.sim, self.context.identity
        source, make = self.plug_ins
        driver = DRIVERS.call(
            settings.driver, make,
            self.context.simulators, BatchedActing(self._act, settings.max_wait_ms / 1000, settings.least_rows),
            LeaseTable(attempts=settings.attempts, lease_s=settings.lease_s),
            make_source(source, self.context.settings, description),
            lambda generator, rows: self.engine.noise(generator, rows), self.limits, self.context.clock.monotonic,
            functools.partial(self._tell, "failed"), prefix=f"{identity.actor}.{identity.incarnation[-6:]}",
            told=lambda tasks: self.instructions.told(tasks))
        if not isinstance(driver, Driver):
            raise BadValue(f"the driver {settings.driver} gave {type(driver).__name__}, which has not all of collect, "
                           "interrupt, statistics", setting=DRIVERS.setting)
        self.driver = driver

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
        with self.context.waiting(f"{len(request.tasks)} fragments", "simulator"):
            begun, found = await self._collected(request.tasks)
        groups = await self.context.compute("values", self._fragments, request, found)
        return Generation(groups, self.context.clock.monotonic() - begun,
                          sum(group.token_count for group in groups), self.proof_of(groups))

    @handles(EvaluateRequest)
    async def evaluate(self, request: EvaluateRequest) -> Evaluated:
        """Episodes of training that simulators are in are begun anew afterwards."""
        await self.wait_for_version(request.version, request.min_ordinal, request.weights_deadline_s)
        assert self.description is not None
        settings, what = self.context.settings.sim, f"{len(request.units)} episodes"
        films = Films(self.description, settings.videos, settings.failed_videos)
        try:
            with self.context.waiting(f"{what} of an evaluation", "simulator"):
                begun, records = await self._in_time(self._alone(request.units, films), f"run {what}")
            with self.context.waiting("their videos", "the encoder"):
                videos = await asyncio.to_thread(films.finish)
        finally:
            films.close()
        if films.problem:
            self._tell("not_filmed", {"text": films.problem})
        return Evaluated(records, self.context.clock.monotonic() - begun,
                         {unit: np.frombuffer(video, np.uint8) for unit, video in videos.items()})

    async def _collected(self, tasks: Sequence[CollectTask]) -> Found:
        return await self._in_time(self._shared(tasks), f"collected {len(tasks)} fragments")

    async def _shared(self, tasks: Sequence[CollectTask]) -> Found:
        assert self.driver is not None
        async with self.simulators_for.shared():
            return self.context.clock.monotonic(), await self.driver.collect(tasks)

    async def _alone(self, units: Sequence[WorkUnit], films: Films) -> Found:
        assert self.driver is not None
        settings = self.context.settings.sim
        async with self.simulators_for.alone():
            begun = self.context.clock.monotonic()
            self.driver.interrupt()
            evaluator = Evaluator(self.context.simulators, self._act_greedily, self.limits,
                                  settings.attempts, self.context.clock.monotonic,
                                  functools.partial(self._tell, "failed"), self.instructions.told, films)
            return begun, await evaluator.run(units)

    async def _in_time(self, work: Coroutine[Any, Any, Found], what: str) -> Found:
        """Raises DeadlineExceeded before the asker does, also where others still have the simulators, and says who is
        attached."""
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
