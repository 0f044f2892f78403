"""Where a bucket's bytes come from. Who wants them knows what they mean; a source brings them, and asks it whether it
brought the right ones.

    DirectSource           from whom the reference names
    fanout.FanOutSource    from whoever is near and has them already
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.errors import DeadlineExceeded, PeerRefused
from cosmos_actor.weight_plane.digest import block_sums, digest_of_sums, raw
from cosmos_actor.weight_plane.errors import WeightsCorrupt
from cosmos_actor.weight_plane.manifest import Manifest, TensorEntry, by_bucket

CONCURRENT_BUCKETS = 4
"""Fetched at a time: one stream at a time leaves a long line idle while digests are computed, all at once hold a whole
second model in buffers."""
ASKED_AT_MOST = 4
"""How often a bucket is asked for whose owner refuses. A version that is not taken ends the job."""
ASK_AGAIN_S = 0.5
"""Between two of them, so that a wrong key still is named within seconds."""

Found = TypeVar("Found")
Look = Callable[[np.ndarray], Found]
"""Takes the bytes of a bucket ([nbytes] uint8), copies out what it needs and returns that, in whatever thread; raises
WeightsCorrupt for bytes that are not the manifest's."""
LookAt = Callable[[np.ndarray, Sequence[TensorEntry], BulkRef], dict[str, Found]]
"""The same, told which tensors are in the bucket and what names it: name -> what it makes of that tensor."""


class Reader(Protocol):
    """What a source needs of a bulk reader."""

    async def fetch(self, ref: BulkRef, *, deadline_s: float) -> np.ndarray: ...

    def check(self, ref: BulkRef) -> None: ...


class Source(Protocol):
    """What a subscriber needs of a source."""

    at_once: int
    """Buckets to ask for at a time."""

    async def bring(self, ref: BulkRef, look: Look[Found], deadline_s: float) -> Found:
        """What `look` makes of the bucket. Raises what it raised for the bytes of `ref.owner` itself, or a BusError."""
        ...

    def whole(self, buckets: list[BulkRef]) -> None:
        """A version that lies in these buckets has been taken, all of it."""

    def statistics(self) -> dict[str, Any]: ...


class DirectSource:
    """Every bucket from its owner: its memory on one host, a stream to another."""

    at_once = CONCURRENT_BUCKETS

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def bring(self, ref: BulkRef, look: Look[Found], deadline_s: float) -> Found:
        return (await self.bring_both(ref, look, deadline_s))[1]

    async def bring_both(self, ref: BulkRef, look: Look[Found], deadline_s: float) -> tuple[np.ndarray, Found]:
        """(the bucket as it came, what `look` made of it)"""
        bucket = await self._fetch(ref, deadline_s)
        try:
            return bucket, await asyncio.get_running_loop().run_in_executor(None, look, raw(bucket))
        except WeightsCorrupt:
            self._reader.check(ref)  # A version freed under the reader is gone, not corrupt.
            raise

    def whole(self, buckets: list[BulkRef]) -> None:
        """Nothing to do: nothing was kept."""

    def statistics(self) -> dict[str, Any]:
        return {}

    async def _fetch(self, ref: BulkRef, deadline_s: float) -> np.ndarray:
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


async def bring_all(
    source: Source, manifest: Manifest, look: LookAt[Found], until: float, deadline_s: float, *,
    setting: str | None = None
) -> dict[str, Found]:
    """What `look` makes of every bucket, in the order of the tensors; on the first error the other fetches end.

    `until` is on the event loop's clock. Raises what `Source.bring` does, and DeadlineExceeded, which tells of the
    `deadline_s` that were allowed and names `setting`, when not all could be asked for by then.
    """
    turns = asyncio.Semaphore(source.at_once)
    clock = asyncio.get_running_loop().time

    async def bring(ref: BulkRef, entries: Sequence[TensorEntry]) -> dict[str, Found]:
        async with turns:
            left = until - clock()
            if left <= 0:
                raise DeadlineExceeded(
                    f"version {manifest.version} was not whole after {deadline_s:g} s: tensor {entries[0].name} and"
                    f" those after it in bucket {entries[0].bucket} of {len(manifest.buckets)} were not asked for yet",
                    peer=ref.owner, setting=setting)
            return await source.bring(ref, partial(look, entries=entries, ref=ref), left)

    contents = by_bucket(manifest.tensors)
    parts = await _all_or_cancel([bring(ref, entries) for ref, entries in zip(manifest.buckets, contents, strict=True)])
    return {name: found for part in parts for name, found in part.items()}


def verified(entry: TensorEntry, bucket: np.ndarray, ref: BulkRef) -> tuple[np.ndarray, np.ndarray]:
    """(the tensor in memory of its own, the `block_sums` that its digest was found from). Raises WeightsCorrupt.

    Copies first, then looks: what is verified is what is returned.
    """
    tensor = entry.view(bucket).copy()
    sums = block_sums(raw(tensor))
    if digest_of_sums(entry.dtype, entry.shape, sums) != entry.digest:
        raise WeightsCorrupt(entry.name, "its bytes are not those of the manifest", peer=ref.owner)
    return tensor, sums


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
