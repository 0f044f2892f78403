"""What the roles share that act with the newest weights: they follow its announcements and say what they hold."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cosmos_actor.actors.experience import Group
from cosmos_actor.actors.role import Role, follows, handles
from cosmos_actor.bus.errors import DeadlineExceeded
from cosmos_actor.roles.fetching import fetched
from cosmos_actor.roles.messages import WEIGHTS_TOPIC, AskWeights, WeightsProof, WeightsReport
from cosmos_actor.weight_plane.errors import WeightsLate
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.swap import WeightsHeld, swap
from cosmos_actor.weight_plane.version import Version

REMEMBERED = 256
"""Versions whose digests are kept to vouch for what was made with them: more than pass while one answer is made."""


class PutOff(Exception):
    """A version can not be taken now, and will be announced again: nothing has gone wrong."""


class WeightsHolder(Role):
    """A swap happens in the worker, where the engine computes too: nothing is computed with half of it.

    A subclass calls `hold_nothing` in `setup` and sets `engine` before weights can come, or in `ready_for_weights`.
    """

    engine: Any

    def hold_nothing(self) -> None:
        self.held: WeightsHeld | None = None
        self.announced: Version | None = None
        self.taken = asyncio.Event()
        self.since = 0.0
        """When what is held was taken, in seconds after 1970."""
        self.taken_versions: deque[WeightsHeld] = deque(maxlen=REMEMBERED)

    async def ready_for_weights(self) -> None:
        """Returns when there is an engine. Raises UserError when there will be none."""

    def weights_held(self) -> str:
        return "" if self.held is None else str(self.held.version)

    def weights_proof(self) -> dict[str, Any]:
        held = self.held
        return {} if held is None else {"version": str(held.version), "digest": held.digest, "since": self.since}

    def proof_of(self, groups: Sequence[Group]) -> dict[str, str]:
        """`Generation.weights` of these groups. What an earlier life of the job published made none of them: whoever
        asks waits for a version of its own."""
        oldest = min((group.version_min for group in groups if group.version_min is not None), default=0)
        newest = max((group.version_max for group in groups if group.version_max is not None), default=-1)
        epoch = -1 if self.held is None else self.held.version.epoch
        return {str(taken.version): taken.digest for taken in list(self.taken_versions)
                if taken.version.epoch == epoch and oldest <= taken.version.step <= newest}

    @handles(AskWeights)
    async def prove(self, question: AskWeights) -> WeightsProof:
        """The digest of what the engine holds now. Waits for what the engine is computing."""
        return await self.context.compute("prove", self._prove)  # type: ignore[no-any-return]

    @follows(WEIGHTS_TOPIC)
    async def on_weights(self, manifest: Manifest) -> None:
        """Pull, verify and swap in a version; report what is then held, or why it could not be taken."""
        self.announced = manifest.version
        if self.held is not None and self.held.version == manifest.version:
            await self._report(manifest, self.held.digest, "")  # announced again, over a new link
            return
        try:
            await self.ready_for_weights()
            held = await fetched(self.context, manifest, WEIGHTS_TOPIC, partial(self.take, manifest))
        except PutOff:
            return
        except Exception as error:  # of any kind: nobody hears what a follower raises, and the job would wait for it
            await self._report(manifest, "", f"{type(error).__name__}: {error}")
            return
        self.taken.set()
        self.taken = asyncio.Event()
        await self._report(manifest, held.digest, "")

    def rounding(self) -> dict[str, float]:
        """WeightsReport.rounding of what is held."""
        return {}

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

    async def take(self, manifest: Manifest, tensors: Mapping[str, Any]) -> WeightsHeld:
        """Swap these tensors in, and say what the engine then holds."""
        return await self.context.compute("load_weights", self._swap, manifest, tensors)  # type: ignore[no-any-return]

    def _swap(self, manifest: Manifest, tensors: Mapping[str, Any]) -> WeightsHeld:
        if self.held is not None and self.held.version == manifest.version:
            return self.held  # by a swap that went on when the link over which it was announced had ended
        self.held = swap(self.engine, manifest, tensors)
        self.since = self.context.clock.wall()
        self.taken_versions.append(self.held)
        return self.held

    def _prove(self) -> WeightsProof:
        held, begun = self.held, self.context.clock.monotonic()
        if held is None:
            return WeightsProof("", "", "", 0.0)
        digest = self.engine.read_back()
        return WeightsProof(str(held.version), digest, held.digest, self.context.clock.monotonic() - begun)

    async def _report(self, manifest: Manifest, digest: str, problem: str) -> None:
        version = manifest.version
        actor = self.context.identity.actor
        rounding = {} if problem else self.rounding()
        await self.context.emit(WeightsReport(actor, version.epoch, version.step, digest, problem, rounding=rounding))

    def _is_behind(self) -> bool:
        """Whether a version was announced here that is not taken yet. A pull without end hides the ones after it."""
        told, held = self.announced, self.held
        return told is not None and (held is None or held.version.ordinal < told.ordinal)
