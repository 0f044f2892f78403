"""Rollout: samples groups with the newest weights it holds, and takes new weights between two batches."""

from __future__ import annotations

import numpy as np

from cosmos_actor.actors.role import handles
from cosmos_actor.actors.trajectory import GenerateTask, TrajectoryGroup
from cosmos_actor.roles.engine import Completion, GenerateItem, RolloutEngine
from cosmos_actor.roles.messages import Generation, GenerationRequest
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.tokenizer import load_tokenizer
from cosmos_actor.roles.weights_holder import WeightsHolder


class RolloutRole(WeightsHolder):
    """Never samples with weights older than a request's `min_version`; one batch is sampled by one version."""

    name = "rollout"
    setup_after = "policy"

    def setup(self) -> None:
        settings = self.context.settings
        self.tokenizer = load_tokenizer(settings.policy.model)
        self.engine = self._make_engine()
        self.hold_nothing()

    def _make_engine(self) -> RolloutEngine:
        from cosmos_actor.roles.torch_engine import TorchEngine
        return TorchEngine.from_settings(self.context.settings)

    @handles(GenerationRequest, concurrency=4)
    async def generate(self, request: GenerationRequest) -> Generation:
        await self.wait_for_version(request.version_dispatch, request.min_ordinal, request.weights_deadline_s)
        return await self.context.compute("generate", self._generate, request)  # type: ignore[no-any-return]

    def _generate(self, request: GenerationRequest) -> Generation:
        begun = self.context.clock.monotonic()
        items = [
            GenerateItem(task.prompt, task.seed, sample) for task in request.tasks for sample in range(task.samples)
        ]
        completions = iter(self.engine.generate(items, self._sampling(request.greedy)))
        groups = [
            self._group(task, [next(completions) for _ in range(task.samples)], request.version_dispatch)
            for task in request.tasks
        ]
        tokens = sum(group.token_count for group in groups)
        return Generation(groups, self.context.clock.monotonic() - begun, tokens)

    def _sampling(self, greedy: bool) -> SamplingSettings:
        section = self.context.settings.rollout
        return SamplingSettings(
            temperature=0.0 if greedy else section.temperature, top_p=section.top_p, top_k=section.top_k,
            max_new_tokens=section.max_new_tokens, stop_ids=self.tokenizer.stop_ids)

    def _group(self, task: GenerateTask, completions: list[Completion], version_dispatch: int) -> TrajectoryGroup:
        assert self.held is not None
        lengths = np.array([len(completion.tokens) for completion in completions], dtype=np.int32)
        return TrajectoryGroup(
            group_id=task.group_id, attempt=task.attempt, task=task.task, prompt=task.prompt, lengths=lengths,
            tokens=np.concatenate([completion.tokens for completion in completions]).astype(np.int32),
            logprobs=np.concatenate([completion.logprobs for completion in completions]).astype(np.float32),
            versions=np.full(int(lengths.sum()), self.held.version.step, dtype=np.int32),
            version_dispatch=version_dispatch,
            finished=np.array([completion.finished for completion in completions], dtype=np.uint8),
            texts=[self.tokenizer.decode(self._answer_ids(completion)) for completion in completions])

    def _answer_ids(self, completion: Completion) -> np.ndarray:
        """The sampled ids without the stop token that ended them."""
        return completion.tokens[:-1] if completion.finished else completion.tokens
