"""Rollout: samples groups with the newest weights it holds, and takes new weights between two batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np

from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.role import Role, follows, handles
from cosmos_actor.actors.trajectory import GenerateTask, TrajectoryGroup
from cosmos_actor.bus.errors import BusError, DeadlineExceeded
from cosmos_actor.roles.engine import Completion, EngineError, GenerateItem, RolloutEngine
from cosmos_actor.roles.messages import WEIGHTS_TOPIC, Generation, GenerationRequest, WeightsReport
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.tokenizer import load_tokenizer
from cosmos_actor.weight_plane.errors import WeightsLate
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.swap import WeightsHeld, swap
from cosmos_actor.weight_plane.version import Version


class RolloutRole(Role):
    """Never samples with weights older than a request's `min_version`; one batch is sampled by one version."""

    name = "rollout"
    setup_after = "policy"

    def setup(self) -> None:
        settings = self.context.settings
        self.tokenizer = load_tokenizer(settings.policy.model)
        self.engine = self._make_engine()
        self.held: WeightsHeld | None = None
        self.announced: Version | None = None
        self.taken = asyncio.Event()

    def _make_engine(self) -> RolloutEngine:
        from cosmos_actor.roles.torch_engine import TorchEngine
        return TorchEngine.from_settings(self.context.settings)

    def weights_held(self) -> str:
        return "" if self.held is None else str(self.held.version)

    @follows(WEIGHTS_TOPIC)
    async def on_weights(self, manifest: Manifest) -> None:
        """Pull, verify and swap in a version; report what is then held, or why it could not be taken."""
        weights = self.context.weights
        assert weights is not None
        self.announced = manifest.version
        if self.held is not None and self.held.version == manifest.version:
            await self._report(manifest, self.held.digest, "")  # announced again, over a new link
            return
        try:
            with self.context.waiting(f"the tensors of weights {manifest.version.step}", "policy"):
                tensors = await weights.pull(manifest, self.context.settings.weights.deadline_s)
            held = await self.context.compute("load_weights", self._swap, manifest, tensors)
        except (BusError, EngineError, UserError) as error:
            await self._report(manifest, "", f"{type(error).__name__}: {error}")
            return
        self.taken.set()
        self.taken = asyncio.Event()
        await self._report(manifest, held.digest, "")

    def _swap(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> WeightsHeld:
        """In the worker, where batches are sampled too: none sees half a swap or is stamped with another version."""
        self.held = swap(self.engine, manifest, tensors)
        return self.held

    async def _report(self, manifest: Manifest, digest: str, problem: str) -> None:
        version = manifest.version
        actor = self.context.identity.actor
        await self.context.emit(WeightsReport(actor, version.epoch, version.step, digest, problem))

    @handles(GenerationRequest, concurrency=4)
    async def generate(self, request: GenerationRequest) -> Generation:
        with self.context.waiting(f"weights of version {request.version_dispatch} or newer", "policy"):
            await self._wait_for_version(request.min_ordinal, request.weights_deadline_s)
        return await self.context.compute("generate", self._generate, request)  # type: ignore[no-any-return]

    async def _wait_for_version(self, ordinal: int, deadline_s: float) -> None:
        until = self.context.clock.monotonic() + deadline_s
        while self.held is None or self.held.version.ordinal < ordinal:
            left = until - self.context.clock.monotonic()
            try:
                await asyncio.wait_for(self.taken.wait(), max(0.0, left))
            except asyncio.TimeoutError as error:
                raise (WeightsLate if self._is_behind() else DeadlineExceeded)(
                    f"{self.context.identity.actor} waited {deadline_s:g} s for newer weights, holds "
                    f"{self.weights_held() or 'none'}, was told of {self.announced or 'none'}",
                    setting="weights.deadline_s") from error

    def _is_behind(self) -> bool:
        """Whether a version was announced here that is not taken yet. A pull without end hides the ones after it."""
        told, held = self.announced, self.held
        return told is not None and (held is None or held.version.ordinal < told.ordinal)

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
