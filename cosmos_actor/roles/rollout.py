"""Rollout: samples groups with the newest weights it holds, and takes new weights between two steps of its engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_actor.actors.loading import load_object
from cosmos_actor.actors.role import follows, handles
from cosmos_actor.actors.trajectory import GenerateTask, TrajectoryGroup
from cosmos_actor.roles.engine import KV_CACHE, WAIT, Completion, EngineError, GenerateItem, RolloutEngine, probe
from cosmos_actor.roles.engines import ENGINES
from cosmos_actor.roles.messages import WEIGHTS_TOPIC, Generation, GenerationRequest
from cosmos_actor.roles.rounding import rounding_in
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.stepping import Stepping, within
from cosmos_actor.roles.tokenizer import load_tokenizer
from cosmos_actor.roles.turn_messages import SleepRequest, TurnBegun, TurnOver, WakeRequest
from cosmos_actor.roles.turn_taking import TurnOrder, Wakefulness, begin_measuring, memory_used
from cosmos_actor.roles.weights_holder import PutOff, WeightsHolder
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.swap import WeightsHeld
from cosmos_actor.weight_plane.version import Version, steps_of


class RolloutRole(WeightsHolder):
    """Never samples with weights older than a request's `min_version`; each token tells its version.

    Unless rollout.on_new_weights says otherwise, a batch is sampled by one version.
    Where it has its GPU in turn with the policy its engine is made in its first turn, and asleep outside of them: what
    is announced then is announced again when it is woken.
    """

    name = "rollout"
    setup_after = "policy"
    _rounding: dict[str, float] = {}

    def setup(self) -> None:
        settings = self.context.settings
        self.tokenizer = load_tokenizer(settings.policy.model)
        self.hold_nothing()
        with self.context.busy(f"the import of {settings.rollout.engine}", settings.supervisor.start_s):
            self._engine_class = load_object(ENGINES[settings.rollout.engine], setting="rollout.engine")
        if not self.context.takes_turns:
            self._make_engine()

    def hold_nothing(self) -> None:
        super().hold_nothing()
        self.order, self.wakefulness = TurnOrder(), Wakefulness(awake=not self.context.takes_turns)
        self.engine: Any = None
        self.dropped: Version | None = None
        """What it held when it went to sleep, and holds no more."""

    def _make_engine(self) -> None:
        settings = self.context.settings
        with self.context.busy(f"the start of {settings.rollout.engine}", settings.supervisor.start_s):
            engine: RolloutEngine = self._engine_class.from_settings(settings)  # imports hold the loop up for seconds
        if self.context.takes_turns and not hasattr(engine, "sleep"):
            raise EngineError(f"rollout.engine = \"{settings.rollout.engine}\" can not sleep: run.colocated_offload = "
                              "false, or rollout.engine = \"torch\"")
        self.engine = engine
        self.stepping = Stepping(self.context, self.engine)

    @handles(GenerationRequest, concurrency=4)
    async def generate(self, request: GenerationRequest) -> Generation:
        if not self.wakefulness.whole:
            with self.context.waiting("its turn on the GPU", "policy"):
                actor, deadline_s = self.context.identity.actor, self.context.settings.run.deadline_s
                await self.wakefulness.wait_until_whole(actor, deadline_s)
        await self.wait_for_version(request.version_dispatch, request.min_ordinal, request.weights_deadline_s)
        items = [
            GenerateItem(task.prompt, task.seed, sample) for task in request.tasks for sample in range(task.samples)
        ]
        answers, seconds = await self.stepping.generate(items, self._sampling(request.greedy))
        completions = iter(answers)
        groups = [
            self._group(task, [next(completions) for _ in range(task.samples)], request.version_dispatch)
            for task in request.tasks
        ]
        tokens = sum(group.token_count for group in groups)
        return Generation(groups, seconds, tokens, self.proof_of(groups))

    @follows(WEIGHTS_TOPIC)
    async def on_weights(self, manifest: Manifest) -> None:
        """See WeightsHolder.on_weights."""
        if not self.wakefulness.holds_weights:
            return
        if manifest.version == self.dropped and self.context.weights is not None:
            self.context.weights.doubt(manifest.version)  # so that it can be pulled once more
        self.dropped = None
        await super().on_weights(manifest)

    async def take(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> WeightsHeld:
        """See WeightsHolder.take. Then the engine proves that it computes, or the process ends at `rollout.probe_s`.

        Raises PutOff when it was put to sleep meanwhile.
        """
        async with self.wakefulness.lock:
            if not self.wakefulness.holds_weights:
                raise PutOff
            if self.context.settings.rollout.on_new_weights != WAIT:
                return await super().take(manifest, tensors)
            async with self.stepping.drained():
                return await super().take(manifest, tensors)

    @handles(SleepRequest)
    async def sleep(self, request: SleepRequest) -> TurnOver:
        """What is in flight ends first; what is asked for from now on waits for the next turn."""
        async with self.wakefulness.lock:
            self.order.accept(request)
            self.wakefulness.asleep()
            if self.engine is None:
                return TurnOver(0.0, 0, 0)
            async with self.stepping.drained():
                return await self.context.compute("sleep", self._sleep, request.level)  # type: ignore[no-any-return]

    @handles(WakeRequest)
    async def wake(self, request: WakeRequest) -> TurnBegun:
        async with self.wakefulness.lock:
            self.order.accept(request)
            begun = self.context.clock.monotonic()
            await self.context.compute("wake", self._wake, request.what)
            self.wakefulness.woken(request.what)
            return TurnBegun(self.context.clock.monotonic() - begun)

    def _sleep(self, level: int) -> TurnOver:
        begun, (peak, used) = self.context.clock.monotonic(), memory_used()
        self.engine.sleep(level)
        if level == 2 and self.held is not None:
            self.dropped, self.held = self.held.version, None
        return TurnOver(self.context.clock.monotonic() - begun, peak, used)

    def _wake(self, what: Sequence[str]) -> None:
        if self.engine is None:
            self._make_engine()
        elif not self.wakefulness.holds_weights:
            begin_measuring()
        self.engine.wake(what)
        if KV_CACHE in what and self.held is not None:
            self._probe()

    def _swap(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> WeightsHeld:
        held = super()._swap(manifest, tensors)
        if self.wakefulness.whole:
            self._probe()
        self._rounding = rounding_in(self.engine.statistics())
        return held

    def _probe(self) -> None:
        settings = self.context.settings
        if settings.run.grouping == "single":  # the whole job's process, in which somebody may be debugging
            probe(self.engine)
        else:
            within(settings.rollout.probe_s, lambda: probe(self.engine))

    def rounding(self) -> dict[str, float]:
        return self._rounding

    def _sampling(self, greedy: bool) -> SamplingSettings:
        section = self.context.settings.rollout
        return SamplingSettings(
            temperature=0.0 if greedy else section.temperature, top_p=section.top_p, top_k=section.top_k,
            max_new_tokens=section.max_new_tokens, stop_ids=self.tokenizer.stop_ids)

    def _group(self, task: GenerateTask, completions: list[Completion], version_dispatch: int) -> TrajectoryGroup:
        lengths = np.array([len(completion.tokens) for completion in completions], dtype=np.int32)
        return TrajectoryGroup(
            group_id=task.group_id, attempt=task.attempt, task=task.task, prompt=task.prompt, lengths=lengths,
            tokens=np.concatenate([completion.tokens for completion in completions]).astype(np.int32),
            logprobs=np.concatenate([completion.logprobs for completion in completions]).astype(np.float32),
            versions=steps_of(np.concatenate([completion.versions for completion in completions])),
            version_dispatch=version_dispatch,
            finished=np.array([completion.finished for completion in completions], dtype=np.uint8),
            texts=[self.tokenizer.decode(self._answer_ids(completion)) for completion in completions])

    def _answer_ids(self, completion: Completion) -> np.ndarray:
        """The sampled ids without the stop token that ended them."""
        return completion.tokens[:-1] if completion.finished else completion.tokens
