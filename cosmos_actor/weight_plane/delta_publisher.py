"""The trainer's side of deltas: compares a version with the one before, and keeps the deltas that lead to the newest.

    manifest of v5: whole in buckets, and deltas v2 -> v3 -> v4 -> v5     (half the bytes of the version at most)
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.errors import BulkFull
from cosmos_actor.weight_plane.comparing import MOST_CHANGED, Compared, compare
from cosmos_actor.weight_plane.delta import Delta, pack, unavailable
from cosmos_actor.weight_plane.digest import stored
from cosmos_actor.weight_plane.manifest import DeltaRef, Manifest

MOST_DELTAS = 16
"""In a manifest. A reader that is further behind takes the version whole."""
MOST_BYTES = 0.5
"""Of a version, for all deltas that lead to it: they lie in memory beside it, and who is so far behind gains little."""
HOLDER = "weight deltas"


def worth_making(use: str, listens_at: str) -> bool:
    """Whether to make deltas, by `weights.delta` and `bus.host`: on loopback nobody reads over a network."""
    return use == "always" or (use == "auto" and not is_loopback(listens_at))


def is_loopback(host: str) -> bool:
    """Whether only this host can reach who listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Store(Protocol):
    """What a publisher needs of a bulk store."""

    def try_put(self, array: Any, *, holder: str) -> BulkRef: ...

    def release(self, ref: BulkRef, holder: str) -> bool: ...

    def reading(self, generation: int) -> AbstractContextManager[np.ndarray | None]:
        """The bytes of an array of its own, for as long as the block runs. Asked for by deltas only."""
        ...


class DeltaPublisher:
    """The deltas of the kept versions. Where there can be none it says why, and the version goes whole."""

    def __init__(self, store: Store, keep: int) -> None:
        self._store = store
        self._never = unavailable()
        if keep < 2:
            self._never = "with weights.keep = 1 the version before is freed first"
        self._why = self._never
        self._held: dict[int, BulkRef] = {}
        self._counts = {"deltas": 0, "delta_bytes": 0}

    def compare(self, before: Manifest | None, tensors: Mapping[str, np.ndarray],
                digests: Mapping[str, bytes] | None) -> Compared:
        """Digests of `tensors`, and what changed since `before` where that can be said."""
        self._why = self._never or _why_incomparable(before, tensors)
        with ExitStack() as reading:
            base = None
            if not self._why and before is not None:
                base = self._bytes_of(before, reading)
            found = compare(tensors, base, digests)
        if found.too_many:
            self._why = f"more than {MOST_CHANGED:.0%} of its elements changed"
        return found

    def with_deltas(self, manifest: Manifest, before: Manifest | None, compared: Compared) -> Manifest:
        """The manifest with the deltas that lead to it, or with the reason why there are none."""
        if self._why or before is None:
            return replace(manifest, why_whole=self._why)
        old, new = before.version, manifest.version
        delta = Delta((old.epoch, old.step), (new.epoch, new.step), before.digest, manifest.digest, compared.parts)
        payload = pack(delta)
        try:
            ref = self._store.try_put(payload, holder=HOLDER)
        except BulkFull:
            self._why = f"its delta of {payload.nbytes} bytes does not fit beside it: raise bulk.budget_bytes"
            return replace(manifest, why_whole=self._why)
        self._held[ref.generation] = ref
        self._counts["deltas"] += 1
        self._counts["delta_bytes"] += payload.nbytes
        newest = DeltaRef(old, new, before.digest, manifest.digest, delta.changed, ref,
                          hashlib.sha256(payload.data).digest())
        older = [one for one in before.deltas if one.payload.generation in self._held]
        return replace(manifest, deltas=_worth_it([*older, newest], manifest.nbytes))

    def keep_those_of(self, manifests: Iterable[Manifest]) -> None:
        """Free every delta that none of these speaks of."""
        spoken_of = {delta.payload.generation for manifest in manifests for delta in manifest.deltas}
        for generation in set(self._held) - spoken_of:
            self._store.release(self._held.pop(generation), HOLDER)

    def make_room(self) -> bool:
        """Free all deltas, so that a whole version fits; whether there were any."""
        any_held = bool(self._held)
        self.keep_those_of([])
        return any_held

    def statistics(self) -> dict[str, Any]:
        """Deltas made and their bytes, and why the newest version has none (empty: it has)."""
        return {**self._counts, "why_whole": self._why}

    def _bytes_of(self, manifest: Manifest, reading: ExitStack) -> dict[str, np.ndarray] | None:
        buckets = [reading.enter_context(self._store.reading(ref.generation)) for ref in manifest.buckets]
        if any(bucket is None for bucket in buckets):
            self._why = "the version before is not there any more"
            return None
        return {entry.name: buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]
                for entry in manifest.tensors}


def _why_incomparable(before: Manifest | None, tensors: Mapping[str, np.ndarray]) -> str:
    if before is None:
        return "it is the first"
    then = {entry.name: (entry.dtype, tuple(entry.shape)) for entry in before.tensors}
    now = {name: (stored(array)[0], array.shape) for name, array in tensors.items()}
    return "" if now == then else "its tensors have other names, dtypes or shapes than those before"


def _worth_it(deltas: list[DeltaRef], nbytes: int) -> list[DeltaRef]:
    """The newest of them, as many as are worth their memory; the last of all is."""
    left = MOST_BYTES * nbytes
    kept: list[DeltaRef] = []
    for delta in reversed(deltas[-MOST_DELTAS:]):
        left -= delta.payload.nbytes
        if left < 0 and kept:
            break
        kept.insert(0, delta)
    return kept
