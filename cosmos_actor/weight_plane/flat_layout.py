"""Where each tensor of a version lies when all of them follow one another on a device. Pure: names and numbers.

    bucket 0  [embed ........ gap][norm gap][q_proj ...... ]     every tensor begins a block of the digest,
    bucket 1  [lm_head ...... gap]                               gaps are zero

So the sums of all blocks of a bucket, computed in one pass, are the sums of its tensors one after the other: a block
that a tensor fills in part has the sums that it would have with nothing behind the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from cosmos_actor.bus.codec import DTYPES
from cosmos_actor.weight_plane.digest import BLOCK_BYTES, block_count
from cosmos_actor.weight_plane.errors import ManifestInvalid
from cosmos_actor.weight_plane.manifest import Manifest, TensorEntry, digest_of_entries

BUCKET_BYTES = 2 << 30
"""Each bucket costs a question and its answer, which is a tenth of the time that 1 GiB takes between two GPUs; one that
were as large as a model of hundreds of GB would ask for that much in one piece."""

Contents = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype as the manifest names it, shape)."""


class Place(NamedTuple):
    """`nbytes` bytes at `offset` of bucket number `bucket`."""

    bucket: int
    offset: int
    nbytes: int

    @property
    def blocks(self) -> slice:
        """Of its bucket."""
        first = self.offset // BLOCK_BYTES
        return slice(first, first + block_count(self.nbytes))


class FlatLayout:
    """Every tensor begins at a block of its bucket, and every bucket is a whole number of blocks."""

    def __init__(self, contents: Contents, places: Mapping[str, Place], buckets: Sequence[int]) -> None:
        """`buckets`: bytes of each."""
        self.contents, self.places, self.buckets = dict(contents), dict(places), list(buckets)

    @property
    def nbytes(self) -> int:
        """Of all buckets, gaps and all."""
        return sum(self.buckets)

    def entries(self, digests: Mapping[str, bytes]) -> list[TensorEntry]:
        """The table of contents of a manifest."""
        return [TensorEntry(name, dtype, shape, self.places[name].nbytes, digests[name], self.places[name].bucket,
                            self.places[name].offset) for name, (dtype, shape) in self.contents.items()]

    def digest(self, digests: Mapping[str, bytes]) -> str:
        """Of the whole version."""
        return digest_of_entries(self.entries(digests))


def arranged(contents: Contents, bucket_bytes: int = BUCKET_BYTES) -> FlatLayout:
    """In the order given; what is larger than a bucket has one to itself. Raises ManifestInvalid for a dtype that can
    not travel, and for nothing at all."""
    if not contents:
        raise ManifestInvalid("a version has no tensors")
    places: dict[str, Place] = {}
    buckets, end = [], 0
    for name, (dtype, shape) in contents.items():
        if dtype not in DTYPES:
            raise ManifestInvalid(f"tensor {name} is {dtype}, which can not travel")
        nbytes = DTYPES[dtype].itemsize * prod(shape)
        room = block_count(nbytes) * BLOCK_BYTES
        if end and end + room > bucket_bytes:
            buckets.append(end)
            end = 0
        places[name] = Place(len(buckets), end, nbytes)
        end += room
    return FlatLayout(contents, places, [*buckets, max(end, BLOCK_BYTES)])


def layout_of(manifest: Manifest) -> FlatLayout | None:
    """As the publisher arranged it; None: not like this."""
    buckets = [ref.nbytes for ref in manifest.buckets]
    places = {entry.name: Place(entry.bucket, entry.offset, entry.nbytes) for entry in manifest.tensors}
    if any(size % BLOCK_BYTES for size in (*buckets, *(place.offset for place in places.values()))):
        return None
    ends = [0] * len(buckets)
    for place in places.values():
        if place.offset < ends[place.bucket]:
            return None
        ends[place.bucket] = place.offset + block_count(place.nbytes) * BLOCK_BYTES
    if any(end > size for end, size in zip(ends, buckets, strict=True)):
        return None
    return FlatLayout({entry.name: (entry.dtype, tuple(entry.shape)) for entry in manifest.tensors}, places, buckets)
