"""How a worker of vLLM takes its part of a version: out of the buckets of a manifest, into memory of its own, verified.

The buckets come from shared memory on the publisher's host, and as streams from elsewhere. One bucket is in hand at a
time for each that is fetched; of a whole tensor no more is kept than the worker's part.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from cosmos_actor.bus import schema
from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.bulk.streams import StreamClient
from cosmos_actor.bus.errors import BusError
from cosmos_actor.bus.keys import KeyRing
from cosmos_actor.weight_plane.errors import ManifestInvalid
from cosmos_actor.weight_plane.manifest import Manifest, TensorEntry
from cosmos_actor.weight_plane.reshard import Box, index, size
from cosmos_actor.weight_plane.source import DirectSource, bring_all, verified
from cosmos_actor.weight_plane.version import Version


def manifest_text(manifest: Manifest) -> str:
    """As text, since vLLM's requests are JSON. It carries secrets of leases, as the manifest does."""
    return base64.b64encode(schema.encode(manifest)[0]).decode()


def manifest_of(text: str) -> Manifest:
    """What `manifest_text` made. Raises ManifestInvalid for anything else."""
    try:
        found = schema.decode(base64.b64decode(text, validate=True), [])
    except (ValueError, binascii.Error, BusError) as error:
        raise ManifestInvalid(f"no manifest: {error}") from error
    if not isinstance(found, Manifest):
        raise ManifestInvalid(f"no manifest, but a {type(found).__name__}")
    return found


class Taker:
    """Takes versions of one run; each is newer than the one before."""

    def __init__(self, run_id: str, keys: str = "") -> None:
        """keys: path of the key file with which other hosts are asked; empty = publishers of this host only."""
        settings = BulkSettings()
        self._streams = StreamClient(settings, KeyRing.load(Path(keys))) if keys else None
        self._reader = BulkReader(settings, self._streams)
        self._run_id = run_id

    def check(self, manifest: Manifest, held: Version | None) -> None:
        """Raises ForeignRun, VersionNotNewer or ManifestInvalid; nothing was fetched."""
        manifest.version.require_run(self._run_id)
        manifest.version.require_newer_than(held, "this worker")
        manifest.check()

    def take(self, manifest: Manifest, boxes: Mapping[str, Box], deadline_s: float) -> dict[str, np.ndarray]:
        """Name -> the box of the tensor in private memory; whole where `boxes` has none. bfloat16 as uint16.

        Every byte of every tensor in the manifest was verified. Raises WeightsCorrupt naming the tensor, BulkGone,
        DeadlineExceeded.
        """
        return asyncio.run(self._take(manifest, boxes, deadline_s))

    def close(self) -> None:
        self._reader.close()

    async def _take(self, manifest: Manifest, boxes: Mapping[str, Box], deadline_s: float) -> dict[str, np.ndarray]:
        until = asyncio.get_running_loop().time() + deadline_s
        return await bring_all(DirectSource(self._reader), manifest, partial(_parts, boxes), until, deadline_s)


def _parts(boxes: Mapping[str, Box], bucket: np.ndarray, entries: Sequence[TensorEntry],
           ref: BulkRef) -> dict[str, np.ndarray]:
    """Each tensor is verified whole, then cut: what is verified is what is kept."""
    kept: dict[str, np.ndarray] = {}
    for entry in entries:
        tensor, _ = verified(entry, bucket, ref)
        box = boxes.get(entry.name)
        if box is None or tensor.size == size(box):
            kept[entry.name] = tensor
        elif size(box):
            kept[entry.name] = tensor[index(box)].copy()
    return kept
