"""Reference for control: log-probs of the actions that were taken, under the policy as PPO found it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np

from cosmos_actor.actors.fragment import Fragment
from cosmos_actor.actors.role import follows
from cosmos_actor.roles.control_messages import DESCRIPTION_TOPIC
from cosmos_actor.roles.messages import ReferenceRequest, Scores, scores_of
from cosmos_actor.roles.reference import ReferenceRole
from cosmos_actor.simulator_bridge.contract import Description
from cosmos_actor.weight_plane.manifest import Manifest


class ControlReferenceRole(ReferenceRole):
    """Its network is made when the run knows what its simulators are; the frozen weights come after that."""

    setup_after = ""

    def setup(self) -> None:
        self.begin()
        self.made = asyncio.Event()

    @follows(DESCRIPTION_TOPIC)
    async def on_description(self, description: Description) -> None:
        if not self.made.is_set():
            await self.context.compute("build", self._build, description)
            self.made.set()

    def _build(self, description: Description) -> None:
        from cosmos_actor.roles.engine import HeldWeights
        from cosmos_actor.trainer.control_scorer import ControlScorer, make_model
        from cosmos_actor.trainer.instructions import observations_of
        from cosmos_actor.trainer.world import choose_device

        settings = self.context.settings
        specs = observations_of(description, kind=settings.control.network.kind)
        model = make_model(settings.control, specs, description.action)
        model.to(choose_device(settings.reference.device)).eval().requires_grad_(False)
        self.scorer = ControlScorer(model, settings.reference.threads)
        self.held = HeldWeights(version=-1, digest="")

    async def ready_for_weights(self) -> None:
        with self.context.waiting("what the simulators are", "controller"):
            await self.made.wait()

    def _take(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> None:
        from cosmos_actor.roles.newer_weights import load_newer

        self.held = load_newer(self.scorer.model, self.held, tensors, manifest.version.ordinal, manifest.digest)
        self.frozen = manifest

    def _score(self, request: ReferenceRequest) -> Scores:
        begun = self.context.clock.monotonic()
        columns = [self._of(group) for group in request.groups]  # type: ignore[arg-type]
        return scores_of(columns, self.context.identity.actor, self.context.clock.monotonic() - begun)

    def _of(self, group: Fragment) -> np.ndarray:
        return self.scorer.score(group.observations, group.actions)[0]
