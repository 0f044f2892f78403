"""The engine's side: pulls a version into private memory and verifies it, whole or not at all.

    nothing held, or no delta from there ──> every bucket                ──> private tensors
    the base of a delta, or of several   ──> what changed, into the base ──> the same tensors, changed in place
    published from a GPU, and one here   ──> every bucket, past the host ──> views of a flat on this GPU
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.weight_plane.delta_taker import DeltaTaker, DeltaUse
from cosmos_actor.weight_plane.manifest import Manifest, TensorEntry
from cosmos_actor.weight_plane.source import DirectSource, Reader, Source, bring_all, verified
from cosmos_actor.weight_plane.version import NewestTaken, Version

if TYPE_CHECKING:
    from cosmos_actor.weight_plane.device_pull import DevicePull

log = logging.getLogger(__name__)


class WeightSubscriber:
    """`pull` gives a newer version of this run, every tensor verified, or raises; versions it gives only grow."""

    def __init__(
        self, reader: Reader, run_id: str, source: Source | None = None, *, delta: DeltaUse = "never",
        device: DevicePull | None = None, say: Callable[[str], None] = log.info
    ) -> None:
        """Without `source` every bucket comes from its owner. `delta`: when to take what changed instead of all.

        `device`: how versions come to a GPU of this process, from those publishers where they can.
        `say` is told how versions come and why, when that changes.
        """
        self._source = source or DirectSource(reader)
        self._deltas = DeltaTaker(self._source, delta, say)
        self._device = device
        self._taken = NewestTaken(run_id, "the subscriber")
        self._one_at_a_time = asyncio.Lock()
        self._counts = {"pulled": 0, "pulled_bytes": 0, "refused": 0}

    @property
    def newest(self) -> Version | None:
        """The newest version that a pull gave, None before the first."""
        return self._taken.newest

    async def pull(self, manifest: Manifest, deadline_s: float) -> Mapping[str, Any]:
        """Name -> tensor in private, writable memory; bfloat16 as uint16.

        From a GPU to one here: name -> torch tensor, views of a flat that is used again once the mapping was dropped.

        Where deltas are used the next one is applied to these tensors, in place once nobody else holds any of them, so
        that they stay what they are for whoever does; writing into them spoils the base.
        Raises VersionNotNewer, ForeignRun or ManifestInvalid before anything is fetched; WeightsCorrupt naming the
        tensor; BulkGone when the publisher freed the version meanwhile; DeadlineExceeded.
        """
        until = asyncio.get_running_loop().time() + deadline_s
        async with self._one_at_a_time:
            try:
                self._taken.check(manifest.version)
                manifest.check()
                tensors = await self._on_device(manifest, until, deadline_s)
                if tensors is None:
                    tensors = await self._on_host(manifest, until, deadline_s)
            except BaseException:
                self._counts["refused"] += 1
                raise
            self._taken.take(manifest.version)
        self._counts["pulled"] += 1
        self._counts["pulled_bytes"] += manifest.nbytes
        return tensors

    def doubt(self, version: Version) -> None:
        """The tensors that the last pull gave as `version` were not its bytes any more when they were looked at, or
        nobody took them: it may be pulled once more, and then it comes whole."""
        if self._taken.doubt(version):
            self._deltas.forget()

    def statistics(self) -> dict[str, Any]:
        """Counts since the start and the newest version."""
        newest = None if self.newest is None else str(self.newest)
        device = {} if self._device is None else self._device.statistics()
        return {**self._counts, **self._deltas.statistics(), **self._source.statistics(), **device, "newest": newest}

    async def _on_device(self, manifest: Manifest, until: float, deadline_s: float) -> Mapping[str, Any] | None:
        """None: it comes through the host's memory."""
        transport = None if self._device is None else self._device.transport_for(manifest)
        if self._device is None or transport is None:
            return None
        return await self._device.pull(transport, manifest, until, deadline_s)

    async def _on_host(self, manifest: Manifest, until: float, deadline_s: float) -> dict[str, np.ndarray]:
        tensors = await self._deltas.take(manifest, until)
        if tensors is None:
            tensors = await self._whole(manifest, until, deadline_s)
        self._source.whole([*manifest.buckets, *(delta.payload for delta in manifest.deltas)])
        return tensors

    async def _whole(self, manifest: Manifest, until: float, deadline_s: float) -> dict[str, np.ndarray]:
        found = await bring_all(self._source, manifest, _verified, until, deadline_s, setting="weights.deadline_s")
        tensors = {name: tensor for name, (tensor, _) in found.items()}
        return await self._deltas.came_whole(manifest, tensors, {name: sums for name, (_, sums) in found.items()})


def _verified(
    bucket: np.ndarray, entries: Sequence[TensorEntry], ref: BulkRef
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {entry.name: verified(entry, bucket, ref) for entry in entries}
