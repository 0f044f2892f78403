"""What of a version really lies on the bulk plane, looked at by whoever put it there.

Bytes in shared memory are only as good as every process that can write to it, and the memory itself: a digest that was
right at the put says nothing about a bit that fell over later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from cosmos_actor.weight_plane.digest import combined_digest, digest_of, raw, stored
from cosmos_actor.weight_plane.manifest import Manifest, TensorEntry, by_bucket


class OwnStore(Protocol):
    """What this needs of the bulk store of the publisher."""

    def reading(self, generation: int) -> AbstractContextManager[Any]: ...


def digest_on_the_plane(store: OwnStore, manifest: Manifest) -> str:
    """The digest of what a reader would find now; empty when the version is not there any more."""
    found = {entry.name: digest_of(entry.dtype, entry.shape, place) for entry, place in _places(store, manifest)}
    return combined_digest(found) if len(found) == len(manifest.tensors) else ""


def put_right(store: OwnStore, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Write the bytes of `tensors`, which the version was made of, wherever others lie; the names of those tensors.

    Who reads meanwhile gets some of both, and its digest says so.
    """
    damaged = []
    for entry, place in _places(store, manifest):
        right = raw(stored(tensors[entry.name])[1])
        if not np.array_equal(place, right):
            np.copyto(place, right)
            damaged.append(entry.name)
    return damaged


def _places(store: OwnStore, manifest: Manifest) -> Iterator[tuple[TensorEntry, np.ndarray]]:
    """Each tensor and its bytes in the publisher's own, writable memory: [nbytes] uint8."""
    for ref, members in zip(manifest.buckets, by_bucket(manifest.tensors), strict=True):
        with store.reading(ref.generation) as block:
            if block is not None:
                for entry in members:
                    yield entry, block[entry.offset : entry.offset + entry.nbytes]
