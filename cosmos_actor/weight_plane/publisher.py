"""The trainer's side: puts a version's tensors on the bulk plane and says in a manifest where they are.

    publish(v3): v1 is freed ──> v3 is copied in ──> manifest     (keep = 2: v2 and v3 can be pulled)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.errors import BulkFull
from cosmos_actor.weight_plane.digest import raw, stored
from cosmos_actor.weight_plane.errors import WeightError
from cosmos_actor.weight_plane.manifest import Manifest, TensorEntry, by_bucket, digest_of_entries, entries_of
from cosmos_actor.weight_plane.version import Version

BUCKET_BYTES = 16 << 20
"""Small enough that a late reader starts on the first while the last is copied; larger messages lose bandwidth."""


class Store(Protocol):
    """What a publisher needs of a bulk store."""

    def try_put(self, array: Any, *, holder: str) -> BulkRef: ...

    def release(self, ref: BulkRef, holder: str) -> bool: ...


class WeightPublisher:
    """The last `keep` versions can be pulled, each whole; versions only grow. One thread uses it at a time."""

    def __init__(
        self,
        store: Store,
        *,
        keep: int = 2,
        bucket_bytes: int = BUCKET_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep` versions, 1 or more: with 1 a pull that began before a publish fails and begins again."""
        if keep < 1:
            raise WeightError(f"at least one version is kept, not {keep}", setting="weights.keep")
        self._store, self._keep, self._bucket_bytes, self._clock = store, keep, bucket_bytes, clock
        self._kept: deque[Manifest] = deque()
        self._newest: Version | None = None
        self._counts = {"published": 0, "freed": 0, "published_bytes": 0, "seconds": 0.0}

    def publish(self, version: Version, tensors: Mapping[str, np.ndarray]) -> Manifest:
        """Copy `tensors` in as `version`, free what is older than the kept ones, and return the manifest.

        Raises VersionNotNewer, ManifestInvalid for what can not travel, and BulkFull naming the setting; then nothing
        new is held.
        """
        begun = self._clock()
        version.require_newer_than(self._newest, "the publisher")
        entries = entries_of(tensors, self._bucket_bytes)
        self._free_down_to(self._keep - 1)
        buckets = self._put(version, entries, tensors)
        manifest = Manifest(version, digest_of_entries(entries), entries, buckets)
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
        return {**self._counts, "kept": [str(manifest.version) for manifest in self._kept]}

    def _put(
        self, version: Version, entries: Sequence[TensorEntry], tensors: Mapping[str, np.ndarray]
    ) -> list[BulkRef]:
        refs: list[BulkRef] = []
        try:
            for members in by_bucket(entries):
                refs.append(self._store.try_put(_packed(members, tensors), holder=_holder(version)))
        except BaseException as error:
            self._release(version, refs)
            if isinstance(error, BulkFull):
                raise self._does_not_fit(version, entries, error) from error
            raise
        return refs

    def _does_not_fit(self, version: Version, entries: Sequence[TensorEntry], error: BulkFull) -> BulkFull:
        nbytes = sum(entry.nbytes for entry in entries)
        return BulkFull(
            f"version {version} of {nbytes} bytes does not fit beside the {len(self._kept)} kept before it: raise"
            f" bulk.budget_bytes above {nbytes * self._keep} or lower weights.keep = {self._keep} ({error.text})",
            setting="bulk.budget_bytes",
        )

    def _free_down_to(self, versions: int) -> None:
        while len(self._kept) > versions:
            oldest = self._kept.popleft()
            self._release(oldest.version, oldest.buckets)
            self._counts["freed"] += 1

    def _release(self, version: Version, refs: Sequence[BulkRef]) -> None:
        for ref in refs:
            self._store.release(ref, _holder(version))


def _holder(version: Version) -> str:
    return f"weights {version}"


def _packed(members: Sequence[TensorEntry], tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """The bytes of one bucket; a tensor that is alone in it is not copied."""
    if len(members) == 1:
        return raw(stored(tensors[members[0].name])[1])
    bucket = np.zeros(members[-1].offset + members[-1].nbytes, np.uint8)
    for entry in members:
        bucket[entry.offset : entry.offset + entry.nbytes] = raw(stored(tensors[entry.name])[1])
    return bucket
