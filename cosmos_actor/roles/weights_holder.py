"""What the roles share that act with the newest weights: they follow its announcements and say what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.role import Role, follows
from cosmos_actor.bus.errors import BusError, DeadlineExceeded
from cosmos_actor.roles.engine import EngineError
from cosmos_actor.roles.messages import WEIGHTS_TOPIC, WeightsReport
from cosmos_actor.weight_plane.errors import WeightsLate
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.swap import WeightsHeld, swap
from cosmos_actor.weight_plane.version import Version


class WeightsHolder(Role):
    """A swap happens in the worker, where the engine computes too: nothing is computed with half of it.

    A subclass calls `hold_nothing` in `setup` and sets `engine` before weights can come, or in `ready_for_weights`.
    """

    engine: Any

    def hold_nothing(self) -> None:
        self.held: WeightsHeld | None = None
        self.announced: Version | None = None
        self.taken = asyncio.Event()

    async def ready_for_weights(self) -> None:
        """Returns when there is an engine."""

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
        await self.ready_for_weights()
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

    async def wait_for_version(self, version: int, ordinal: int, deadline_s: float) -> None:
        """Until weights of `ordinal` or newer are held. Raises WeightsLate or DeadlineExceeded."""
        until = self.context.clock.monotonic() + deadline_s
        with self.context.waiting(f"weights of version {version} or newer", "policy"):
            while self.held is None or self.held.version.ordinal < ordinal:
                left = until - self.context.clock.monotonic()
                try:
                    await asyncio.wait_for(self.taken.wait(), max(0.0, left))
                except asyncio.TimeoutError as error:
                    raise (WeightsLate if self._is_behind() else DeadlineExceeded)(
                        f"{self.context.identity.actor} waited {deadline_s:g} s for newer weights, holds "
                        f"{self.weights_held() or 'none'}, was told of {self.announced or 'none'}",
                        setting="weights.deadline_s") from error

    def _swap(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> WeightsHeld:
        self.held = swap(self.engine, manifest, tensors)
        return self.held

    async def _report(self, manifest: Manifest, digest: str, problem: str) -> None:
        version = manifest.version
        actor = self.context.identity.actor
        await self.context.emit(WeightsReport(actor, version.epoch, version.step, digest, problem))

    def _is_behind(self) -> bool:
        """Whether a version was announced here that is not taken yet. A pull without end hides the ones after it."""
        told, held = self.announced, self.held
        return told is not None and (held is None or held.version.ordinal < told.ordinal)
