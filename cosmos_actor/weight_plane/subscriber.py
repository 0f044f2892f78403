"""The engine's side: pulls a version into private memory and verifies it, whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.errors import DeadlineExceeded, PeerRefused
from cosmos_actor.weight_plane.digest import digest_of, raw
from cosmos_actor.weight_plane.errors import ForeignRun, WeightsCorrupt
from cosmos_actor.weight_plane.manifest import Manifest, TensorEntry, by_bucket
from cosmos_actor.weight_plane.version import Version

CONCURRENT_BUCKETS = 4
"""Fetched at a time: one stream at a time leaves a long line idle while digests are computed, all at once hold a whole
second model in buffers."""
ASKED_AT_MOST = 4
"""How often a bucket is asked for whose owner refuses. A version that is not taken ends the job."""
ASK_AGAIN_S = 0.5
"""Between two of them, so that a wrong key still is named within seconds."""


class Reader(Protocol):
    """What a subscriber needs of a bulk reader."""

    async def fetch(self, ref: BulkRef, *, deadline_s: float) -> np.ndarray: ...

    def check(self, ref: BulkRef) -> None: ...


class WeightSubscriber:
    """`pull` gives a newer version of this run, every tensor verified, or raises; versions it gives only grow."""

    def __init__(self, reader: Reader, run_id: str) -> None:
        self._reader, self._run_id = reader, run_id
        self._newest: Version | None = None
        self._one_at_a_time = asyncio.Lock()
        self._counts = {"pulled": 0, "pulled_bytes": 0, "refused": 0}

    @property
    def newest(self) -> Version | None:
        """The newest version that a pull gave, None before the first."""
        return self._newest

    async def pull(self, manifest: Manifest, deadline_s: float) -> dict[str, np.ndarray]:
        """Name -> tensor in private, writable memory; bfloat16 as uint16.

        Raises VersionNotNewer, ForeignRun or ManifestInvalid before anything is fetched; WeightsCorrupt naming the
        tensor; BulkGone when the publisher freed the version meanwhile; DeadlineExceeded.
        """
        until = asyncio.get_running_loop().time() + deadline_s
        async with self._one_at_a_time:
            try:
                self._check(manifest)
                tensors = await self._fetch_all(manifest, until, deadline_s)
            except BaseException:
                self._counts["refused"] += 1
                raise
            self._newest = manifest.version
        self._counts["pulled"] += 1
        self._counts["pulled_bytes"] += manifest.nbytes
        return tensors

    def statistics(self) -> dict[str, Any]:
        """Counts since the start and the newest version."""
        return {**self._counts, "newest": None if self._newest is None else str(self._newest)}

    def _check(self, manifest: Manifest) -> None:
        version = manifest.version
        if version.run_id != self._run_id:
            raise ForeignRun(f"version {version} is of run {version.run_id}, this is run {self._run_id}")
        version.require_newer_than(self._newest, "the subscriber")
        manifest.check()

    async def _fetch_all(self, manifest: Manifest, until: float, deadline_s: float) -> dict[str, np.ndarray]:
        turns = asyncio.Semaphore(CONCURRENT_BUCKETS)
        clock = asyncio.get_running_loop().time

        async def fetch(ref: BulkRef, entries: Sequence[TensorEntry]) -> dict[str, np.ndarray]:
            async with turns:
                left = until - clock()
                if left <= 0:
                    raise _too_late(manifest, entries[0], deadline_s)
                return await self._fetch(ref, entries, left)

        contents = by_bucket(manifest.tensors)
        parts = await _all_or_cancel([fetch(ref, part) for ref, part in zip(manifest.buckets, contents, strict=True)])
        pulled = {name: tensor for part in parts for name, tensor in part.items()}
        return {entry.name: pulled[entry.name] for entry in manifest.tensors}

    async def _fetch(self, ref: BulkRef, entries: Sequence[TensorEntry], deadline_s: float) -> dict[str, np.ndarray]:
        bucket = await self._bucket(ref, deadline_s)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(None, _verified, raw(bucket), entries, ref)
        except WeightsCorrupt:
            self._reader.check(ref)  # A version freed under the reader is gone, not corrupt.
            raise


    async def _bucket(self, ref: BulkRef, deadline_s: float) -> np.ndarray:
        """Whose handshakes are damaged on the way is refused as who has a wrong key is: that is asked again."""
        clock = asyncio.get_running_loop().time
        until = clock() + deadline_s
        for _ in range(ASKED_AT_MOST - 1):
            try:
                return await self._reader.fetch(ref, deadline_s=until - clock())
            except PeerRefused:
                if until - clock() <= ASK_AGAIN_S:
                    raise
                await asyncio.sleep(ASK_AGAIN_S)
        return await self._reader.fetch(ref, deadline_s=until - clock())


def _verified(bucket: np.ndarray, entries: Sequence[TensorEntry], ref: BulkRef) -> dict[str, np.ndarray]:
    """Copies first, then looks: what is verified is what is returned."""
    tensors: dict[str, np.ndarray] = {}
    for entry in entries:
        tensor = entry.view(bucket).copy()
        if digest_of(entry.dtype, entry.shape, raw(tensor)) != entry.digest:
            raise WeightsCorrupt(entry.name, "its bytes are not those of the manifest", peer=ref.owner)
        tensors[entry.name] = tensor
    return tensors


async def _all_or_cancel(coroutines: Iterable[Any]) -> list[Any]:
    """All results in order; on the first error the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _too_late(manifest: Manifest, next_one: TensorEntry, deadline_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"version {manifest.version} was not whole after {deadline_s:g} s: tensor {next_one.name} and those after it"
        f" in bucket {next_one.bucket} of {len(manifest.buckets)} were not asked for yet",
        peer=manifest.buckets[next_one.bucket].owner,
        setting="weights.deadline_s",
    )
