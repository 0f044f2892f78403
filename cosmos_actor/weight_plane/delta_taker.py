"""The engine's side of deltas: whether to take them, from which version, and what to do when one is damaged."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np

from cosmos_actor.bus.errors import BusError
from cosmos_actor.bus.identity import host_id
from cosmos_actor.weight_plane.base import Base
from cosmos_actor.weight_plane.delta import unavailable
from cosmos_actor.weight_plane.errors import WeightError, WeightsCorrupt
from cosmos_actor.weight_plane.manifest import DeltaRef, Manifest
from cosmos_actor.weight_plane.source import Source

log = logging.getLogger(__name__)

DeltaUse = Literal["auto", "never", "always"]
"""`auto`: where the bytes cross a network. On one host a whole version is copied faster than its changes are found."""
SHARE_OF_TIME = 0.5
"""Of what is left to a pull, for the deltas: the rest is for the whole version, should they not come."""


class DeltaTaker:
    """Holds the newest version in memory, one model's worth of it, for as long as deltas may lead on from there."""

    def __init__(self, source: Source, use: DeltaUse, say: Callable[[str], None] = log.info) -> None:
        """`say` is told how versions come, when that changes. Raises WeightError if deltas must be used and can not."""
        self._source, self._use, self._say = source, use, say
        self._never = "weights.delta = never" if use == "never" else unavailable()
        if use == "always" and self._never:
            raise WeightError(f"no deltas can be taken: {self._never}", setting="weights.delta")
        self._base: Base | None = None
        self._told = ""
        self._counts = {"deltas": 0, "delta_bytes": 0, "deltas_refused": 0, "whole_bytes": 0}

    async def take(self, manifest: Manifest, until: float) -> dict[str, np.ndarray] | None:
        """The tensors of the version, if deltas lead there; None if it has to come whole. The reason is told once."""
        chain, why = self._chain(manifest)
        if self._base is None or why:
            self._tell(manifest, f"whole: {why}")
            return None
        nbytes = sum(delta.payload.nbytes for delta in chain)
        try:
            await self._follow(chain, until)
        except BusError as error:
            self._counts["deltas_refused"] += 1
            log.warning("weights %s come whole: %s: %s", manifest.version, type(error).__name__, error)
            return None
        if self._base.digest != manifest.digest:
            return None
        self._counts["deltas"] += len(chain)
        self._counts["delta_bytes"] += nbytes
        self._tell(manifest, "as what changed: the bytes cross a network" if self._use == "auto" else
                   "as what changed: weights.delta = always")
        return self._in_order(manifest, self._base)

    async def came_whole(
        self, manifest: Manifest, tensors: dict[str, np.ndarray], sums: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """This version was pulled and verified: the base from now on, if deltas may be used. The tensors, as they lie
        then."""
        self._counts["whole_bytes"] += manifest.nbytes
        self._base = None
        if self._why_never(manifest):
            return tensors
        make = partial(Base, manifest.version, tensors, sums)
        self._base = await asyncio.get_running_loop().run_in_executor(None, make)
        return self._in_order(manifest, self._base)

    def forget(self) -> None:
        """What is held is not what it is said to be: no delta leads on from there."""
        self._base = None

    def statistics(self) -> dict[str, Any]:
        """Counts since the start, the memory that the base takes, and how the newest version came."""
        if self._use == "never":
            return {}
        held = 0 if self._base is None else self._base.nbytes
        return {**self._counts, "base_bytes": held, "came": self._told}

    def _in_order(self, manifest: Manifest, base: Base) -> dict[str, np.ndarray]:
        tensors = base.tensors
        return {entry.name: tensors[entry.name] for entry in manifest.tensors}

    def _chain(self, manifest: Manifest) -> tuple[list[DeltaRef], str]:
        """(deltas to take in turn, why it comes whole instead)"""
        why = self._why_never(manifest)
        base = self._base
        if why or base is None:
            return [], why or "nothing is held that a delta could change"
        if (base.version, base.digest) == (manifest.version, manifest.digest):
            return [], ""
        starts = [(delta.base, delta.base_digest) for delta in manifest.deltas]
        if (base.version, base.digest) not in starts:
            return [], manifest.why_whole or f"no delta leads there from version {base.version}, which is held"
        chain = manifest.deltas[starts.index((base.version, base.digest)) :]
        if sum(delta.payload.nbytes for delta in chain) >= manifest.nbytes:
            return [], "the deltas from the version that is held have more bytes"
        return chain, ""

    def _why_never(self, manifest: Manifest) -> str:
        if self._never or self._use == "always":
            return self._never
        if all(ref.host_id == host_id() for ref in manifest.buckets[:1]):
            return "it lies on this host, where a copy is faster"
        return ""

    async def _follow(self, chain: list[DeltaRef], until: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + (until - loop.time()) * SHARE_OF_TIME
        assert self._base is not None
        for delta in chain:
            look = partial(_own_copy, delta=delta)
            payload = await self._source.bring(delta.payload, look, until - loop.time())
            await loop.run_in_executor(None, self._base.apply, delta, payload)

    def _tell(self, manifest: Manifest, how: str) -> None:
        if how != self._told and self._use != "never":
            self._say(f"weights {manifest.version} come {how}")
        self._told = how


def _own_copy(payload: np.ndarray, delta: DeltaRef) -> np.ndarray:
    copy = payload.copy()
    if hashlib.sha256(copy.data).digest() != delta.payload_digest:
        raise WeightsCorrupt("(all)", f"the bytes of {delta} are not those of the manifest", peer=delta.payload.owner)
    return copy
