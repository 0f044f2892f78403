"""The trainer's side: puts a version's tensors on the bulk plane and says in a manifest where they are.

    publish(v3): v1 is freed ──> v3 is copied in ──> manifest     (keep = 2: v2 and v3 can be pulled)

With deltas it also compares v3 with v2, which still lies on the bulk plane, and puts there what changed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_actor.bus.bulk.allocator import block_bytes
from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.errors import BulkFull
from cosmos_actor.weight_plane.delta_publisher import DeltaPublisher, Store
from cosmos_actor.weight_plane.digest import raw, stored
from cosmos_actor.weight_plane.errors import WeightError
from cosmos_actor.weight_plane.manifest import Manifest, TensorEntry, by_bucket, digest_of_entries, entries_of
from cosmos_actor.weight_plane.version import Version

BUCKET_BYTES = 16 << 20
"""Small enough that a late reader starts on the first while the last is copied; larger messages lose bandwidth."""
SMALLEST_BUCKET_BYTES = 1 << 20
"""Each costs a lease and a round trip."""
BUCKETS_OF_A_VERSION = 32
"""At least, if they are not smaller than that: readers that pass them on to each other would else wait for whole
buckets most of the time."""


class WeightPublisher:
    """The last `keep` versions can be pulled, each whole; versions only grow. One thread uses it at a time."""

    def __init__(
        self,
        store: Store,
        *,
        keep: int = 2,
        in_budget: int | None = None,
        bucket_bytes: int | None = None,
        deltas: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep` versions, 1 or more: with 1 a pull that began before a publish fails and begins again.

        `in_budget`: versions that the store has to have room for, with those of other publishers; `keep` unless given.
        It decides what is said where one does not fit.
        Without `bucket_bytes` buckets have BUCKET_BYTES, or less where a version would have few of them.
        With `deltas` a version can also be had as what changed since the one before.
        """
        if keep < 1:
            raise WeightError(f"at least one version is kept, not {keep}", setting="weights.keep")
        self._store, self._keep, self._bucket_bytes, self._clock = store, keep, bucket_bytes, clock
        self._in_budget = keep if in_budget is None else in_budget
        self._kept: deque[Manifest] = deque()
        self._newest: Version | None = None
        self._packing = np.zeros(0, np.uint8)
        """Used again and again: fresh memory costs more than the copy into it."""
        self._deltas = DeltaPublisher(store, keep) if deltas else None
        self._counts = {"published": 0, "freed": 0, "published_bytes": 0, "seconds": 0.0}

    def publish(
        self, version: Version, tensors: Mapping[str, np.ndarray], digests: Mapping[str, bytes] | None = None
    ) -> Manifest:
        """Copy `tensors` in as `version`, free what is older than the kept ones, and return the manifest.

        `digests`: those of the tensors, where they were computed on the device that the tensors came from.
        Raises VersionNotNewer, ManifestInvalid for what can not travel, and BulkFull naming the setting; then nothing
        new is held.
        """
        begun = self._clock()
        version.require_newer_than(self._newest, "the publisher")
        compared = None
        if self._deltas is not None:
            compared = self._deltas.compare(self.newest, tensors, digests)
            digests = compared.digests
        entries = entries_of(tensors, self._bucket_bytes or _bucket_bytes(tensors), digests)
        self._free_down_to(self._keep - 1)
        try:
            buckets = self._put(version, entries, tensors)
        except BulkFull:
            if self._deltas is None or not self._deltas.make_room():
                raise
            buckets = self._put(version, entries, tensors)
        manifest = Manifest(version, digest_of_entries(entries), entries, buckets)
        if self._deltas is not None and compared is not None:
            manifest = self._deltas.with_deltas(manifest, self.newest, compared)
        self._kept.append(manifest)
        self._newest = version
        self._counts["published"] += 1
        self._counts["published_bytes"] += manifest.nbytes
        self._counts["seconds"] += self._clock() - begun
        return manifest

    @property
    def newest(self) -> Manifest | None:
        """The manifest of the newest version, None before the first."""
        return self._kept[-1] if self._kept else None

    def close(self) -> None:
        """Free every version."""
        self._free_down_to(0)

    def statistics(self) -> dict[str, Any]:
        """Counts since the start, seconds spent publishing, and the versions that can be pulled now."""
        deltas = {} if self._deltas is None else self._deltas.statistics()
        return {**self._counts, **deltas, "kept": [str(manifest.version) for manifest in self._kept]}

    def _put(
        self, version: Version, entries: Sequence[TensorEntry], tensors: Mapping[str, np.ndarray]
    ) -> list[BulkRef]:
        refs: list[BulkRef] = []
        try:
            for members in by_bucket(entries):
                refs.append(self._store.try_put(self._packed(members, tensors), holder=_holder(version)))
        except BaseException as error:
            self._release(version, refs)
            if isinstance(error, BulkFull):
                raise self._does_not_fit(version, entries, error) from error
            raise
        return refs

    def _packed(self, members: Sequence[TensorEntry], tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """The bytes of one bucket, until the next is packed; a tensor that is alone in it is not copied."""
        if len(members) == 1:
            return raw(stored(tensors[members[0].name])[1])
        end = members[-1].offset + members[-1].nbytes
        if len(self._packing) < end:
            self._packing = np.zeros(end, np.uint8)
        bucket, filled = self._packing[:end], 0
        for entry in members:
            bucket[filled : entry.offset] = 0
            filled = entry.offset + entry.nbytes
            bucket[entry.offset : filled] = raw(stored(tensors[entry.name])[1])
        return bucket

    def _does_not_fit(self, version: Version, entries: Sequence[TensorEntry], error: BulkFull) -> BulkFull:
        nbytes = sum(entry.nbytes for entry in entries)
        room = self._in_budget * sum(
            block_bytes(members[-1].offset + members[-1].nbytes) for members in by_bucket(entries))
        return BulkFull(
            f"version {version} of {nbytes} bytes does not fit beside the {len(self._kept)} kept before it: raise"
            f" bulk.budget_bytes above {room}, for {self._in_budget} as large, or lower weights.keep ({error.text})",
            setting="bulk.budget_bytes",
        )

    def _free_down_to(self, versions: int) -> None:
        while len(self._kept) > versions:
            oldest = self._kept.popleft()
            self._release(oldest.version, oldest.buckets)
            self._counts["freed"] += 1
        if self._deltas is not None:
            self._deltas.keep_those_of(self._kept)

    def _release(self, version: Version, refs: Sequence[BulkRef]) -> None:
        for ref in refs:
            self._store.release(ref, _holder(version))


def _holder(version: Version) -> str:
    return f"weights {version}"


def _bucket_bytes(tensors: Mapping[str, np.ndarray]) -> int:
    nbytes = sum(array.nbytes for array in tensors.values())
    return max(SMALLEST_BUCKET_BYTES, min(BUCKET_BYTES, nbytes // BUCKETS_OF_A_VERSION))
