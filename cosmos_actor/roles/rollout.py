"""Rollout: samples groups with the newest weights it holds, and takes new weights between two steps of its engine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cosmos_actor.actors.loading import load_object
from cosmos_actor.actors.role import handles
from cosmos_actor.actors.trajectory import GenerateTask, TrajectoryGroup
from cosmos_actor.roles.engine import WAIT, Completion, GenerateItem, RolloutEngine, probe
from cosmos_actor.roles.engines import ENGINES
from cosmos_actor.roles.messages import Generation, GenerationRequest
from cosmos_actor.roles.rounding import rounding_in
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.stepping import Stepping, within
from cosmos_actor.roles.tokenizer import load_tokenizer
from cosmos_actor.roles.weights_holder import WeightsHolder
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.swap import WeightsHeld
from cosmos_actor.weight_plane.version import steps_of


class RolloutRole(WeightsHolder):
    """Never samples with weights older than a request's `min_version`; each token tells its version.

    Unless rollout.on_new_weights says otherwise, a batch is sampled by one version.
    """

    name = "rollout"
    setup_after = "policy"
    _rounding: dict[str, float] = {}

    def setup(self) -> None:
        settings = self.context.settings
        self.tokenizer = load_tokenizer(settings.policy.model)
        engine_class = load_object(ENGINES[settings.rollout.engine], setting="rollout.engine")
        with self.context.busy(f"the start of {settings.rollout.engine}", settings.supervisor.start_s):
            self.engine: RolloutEngine = engine_class.from_settings(settings)  # imports hold the loop up for seconds
        self.stepping = Stepping(self.context, self.engine)
        self.hold_nothing()

    @handles(GenerationRequest, concurrency=4)
    async def generate(self, request: GenerationRequest) -> Generation:
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

    async def take(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> WeightsHeld:
        """See WeightsHolder.take. Then the engine proves that it computes, or the process ends at `rollout.probe_s`."""
        if self.context.settings.rollout.on_new_weights != WAIT:
            return await super().take(manifest, tensors)
        async with self.stepping.drained():
            return await super().take(manifest, tensors)

    def _swap(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> WeightsHeld:
        held = super()._swap(manifest, tensors)
        settings = self.context.settings
        if settings.run.grouping == "single":  # the whole job's process, in which somebody may be debugging
            probe(self.engine)
        else:
            within(settings.rollout.probe_s, lambda: probe(self.engine))
        self._rounding = rounding_in(self.engine.statistics())
        return held

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
