"""Reference: log-probs of sampled tokens under the frozen policy of the KL term."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import numpy as np

from cosmos_actor.actors.role import Role, follows, handles
from cosmos_actor.bus.errors import DeadlineExceeded
from cosmos_actor.roles.fetching import fetched
from cosmos_actor.roles.messages import REFERENCE_TOPIC, ReferenceRequest, Scores, WeightsReport, scores_of
from cosmos_actor.weight_plane.manifest import Manifest


class ReferenceRole(Role):
    """Stateless: the frozen weights are announced anew to whoever joins. Scores nothing before it has verified them."""

    name = "reference"
    setup_after = "policy"

    def setup(self) -> None:
        from cosmos_actor.trainer.scorer import Scorer

        settings = self.context.settings
        self.scorer = Scorer(settings.policy, temperature=settings.rollout.logprob_temperature,
                             device=settings.reference.device, threads=settings.reference.threads)
        self.begin()

    def begin(self) -> None:
        """Nothing is frozen yet."""
        self.frozen: Manifest | None = None
        self.taken = asyncio.Event()

    async def ready_for_weights(self) -> None:
        """Returns when there is a model to put them into."""

    def weights_held(self) -> str:
        return "" if self.frozen is None else str(self.frozen.version.step)

    @follows(REFERENCE_TOPIC)
    async def on_weights(self, manifest: Manifest) -> None:
        """Pull and verify them; say why if they can not be had, since nobody hears what a follower raises."""
        if self.frozen is not None and self.frozen.version == manifest.version:
            return  # announced again, over a new link
        take = partial(self.context.compute, "load_weights", self._take_once, manifest)
        try:
            await self.ready_for_weights()
            await fetched(self.context, manifest, REFERENCE_TOPIC, take)
        except Exception as error:  # of any kind: what is not said, the job would wait for to its deadline
            version, actor = manifest.version, self.context.identity.actor
            await self.context.emit(WeightsReport(actor, version.epoch, version.step, "",
                                                  f"{type(error).__name__}: {error}", REFERENCE_TOPIC))
            return
        self.taken.set()

    def _take_once(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> None:
        """What began before the link over which it was announced ended may have been done meanwhile."""
        if self.frozen is None or self.frozen.version != manifest.version:
            self._take(manifest, tensors)

    def _take(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> None:
        self.scorer.load_weights(tensors, manifest.version.step, manifest.digest)
        self.frozen = manifest

    @handles(ReferenceRequest, concurrency=4)
    async def score(self, request: ReferenceRequest) -> Scores:
        deadline_s = self.context.settings.weights.deadline_s
        try:
            await asyncio.wait_for(self.taken.wait(), deadline_s)
        except asyncio.TimeoutError as error:
            actor = self.context.identity.actor
            raise DeadlineExceeded(
                f"{actor} has waited {deadline_s:g} s for the reference weights", setting="weights.deadline_s"
            ) from error
        return await self.context.compute("score", self._score, request)  # type: ignore[no-any-return]

    def _score(self, request: ReferenceRequest) -> Scores:
        begun = self.context.clock.monotonic()
        columns = self.scorer.logprobs(request.groups)
        return scores_of(columns, self.context.identity.actor, self.context.clock.monotonic() - begun)
