"""The trainer's side on a device: a version is published where its snapshot lies, and no byte is copied for it.

    snapshot of v6 in flat B ──> digests of B ──> manifest      v5 in flat A can be pulled until A is needed for v7
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.weight_plane.digest import combined_digest
from cosmos_actor.weight_plane.errors import WeightError
from cosmos_actor.weight_plane.flat import Flat, FlatTensors, aside
from cosmos_actor.weight_plane.flat_pool import FlatPool, Hold, NoFreeBuffer
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.version import Version

ROOM_WITHIN_S = 30.0
"""For the next snapshot. Who is in the midst of a broadcast of a version that was freed loses it at once, and who makes
a group for it has `pair.SETUP_S`; longer than this takes only a GPU that hangs."""


class Server(Protocol):
    """Where buckets on a device can be asked for."""

    def lease(self, hold: Hold) -> list[BulkRef]: ...

    def release(self, refs: list[BulkRef]) -> None: ...


class _Kept(NamedTuple):
    manifest: Manifest
    flat: Flat


class DevicePublisher:
    """The last `keep` versions can be pulled, fewer while the memory of one is needed for the next; versions only grow.

    From any thread: whoever trains makes room while another thread publishes.
    """

    def __init__(self, server: Server, pool: FlatPool, *, keep: int = 2,
                 clock: Callable[[], float] = time.monotonic) -> None:
        if keep < 1:
            raise WeightError(f"at least one version is kept, not {keep}", setting="weights.keep")
        self._server, self._pool, self._keep, self._clock = server, pool, min(keep, pool.buffers), clock
        self._kept: deque[_Kept] = deque()
        self._newest: Version | None = None
        self._lock = threading.RLock()
        self._counts = {"published": 0, "freed": 0, "published_bytes": 0, "seconds": 0.0}

    def publish(self, version: Version, tensors: FlatTensors) -> Manifest:
        """The manifest of the flat that `tensors` are views of, which is held until the version is freed.

        Raises VersionNotNewer; then nothing new is held.
        """
        begun, flat = self._clock(), tensors.flat
        with self._lock:
            version.require_newer_than(self._newest, "the publisher")
            with aside(flat.device):
                digests = flat.digests()
            entries = flat.layout.entries(digests)
            self._free_down_to(self._keep - 1)
            buckets = self._server.lease(self._pool.hold(flat))
            manifest = Manifest(version, combined_digest(digests), entries, buckets, why_whole="it comes from a GPU")
            self._kept.append(_Kept(manifest, flat))
            self._newest = version
        self._counts["published"] += 1
        self._counts["published_bytes"] += manifest.nbytes
        self._counts["seconds"] += self._clock() - begun
        return manifest

    @property
    def newest(self) -> Manifest | None:
        """The manifest of the newest version, None before the first."""
        with self._lock:
            return self._kept[-1].manifest if self._kept else None

    def make_room(self, within_s: float = ROOM_WITHIN_S) -> None:
        """Have a flat for the next version, and free the oldest for it where all are kept. What is being published is
        waited for, so that nothing is freed before a newer one can be pulled. Raises NoFreeBuffer."""
        with self._lock:
            if not self._pool.has_room():
                self._free_down_to(self._pool.buffers - 1)
        if not self._pool.wait_for_room(within_s):
            raise NoFreeBuffer(f"readers have held the memory of a version on {self._pool.device} for {within_s:g} s")

    def digest_now(self, manifest: Manifest) -> str:
        """Of what a reader would find now; empty when the version is not there any more."""
        digests = self._digests_now(manifest)
        return "" if digests is None else combined_digest(digests)

    def damaged(self, manifest: Manifest) -> list[str]:
        """The tensors whose bytes are not those that were published."""
        digests = self._digests_now(manifest) or {}
        return [entry.name for entry in manifest.tensors if digests.get(entry.name, entry.digest) != entry.digest]

    def put_right(self, manifest: Manifest, tensors: FlatTensors) -> list[str]:
        """Write what lies damaged anew from `tensors`, another snapshot of the same weights. The names of those that
        are right now: only bytes with the published digest are written."""
        with self._lock, aside(self._pool.device):
            flat = self._flat_of(manifest)
            if flat is None:
                return []
            good = tensors.flat.digests()
            damaged = [entry for entry in manifest.tensors
                       if entry.name in set(self.damaged(manifest)) and good.get(entry.name) == entry.digest]
            flat.fill({entry.name: tensors[entry.name] for entry in damaged})
        return [entry.name for entry in damaged]

    def close(self) -> None:
        """Free every version."""
        with self._lock:
            self._free_down_to(0)

    def statistics(self) -> dict[str, Any]:
        """Counts since the start, seconds spent publishing, and the versions that can be pulled now."""
        with self._lock:
            return {**self._counts, "kept": [str(kept.manifest.version) for kept in self._kept]}

    def _digests_now(self, manifest: Manifest) -> dict[str, bytes] | None:
        with self._lock:
            flat = self._flat_of(manifest)
            hold = None if flat is None else self._pool.hold(flat)
        if flat is None or hold is None:
            return None
        try:
            with aside(flat.device):
                return flat.digests()
        finally:
            hold.release()

    def _flat_of(self, manifest: Manifest) -> Flat | None:
        return next((kept.flat for kept in self._kept if kept.manifest.version == manifest.version), None)

    def _free_down_to(self, versions: int) -> None:
        while len(self._kept) > versions:
            self._server.release(self._kept.popleft().manifest.buckets)
            self._counts["freed"] += 1
