"""What a version of the weights consists of: every tensor by name, and the buckets that its bytes lie in.

A bucket is one array on the bulk plane that holds many small tensors, or one large one: a thousand small references
would each cost a lease and a round trip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import groupby
from math import prod
from operator import attrgetter

import numpy as np

from cosmos_actor.bus.bulk.ref import BulkRef, possible_shape
from cosmos_actor.bus.codec import DTYPES
from cosmos_actor.bus.schema import schema
from cosmos_actor.weight_plane.digest import combined_digest, stored, tensor_digests
from cosmos_actor.weight_plane.errors import ManifestInvalid
from cosmos_actor.weight_plane.version import Version

ALIGNMENT_BYTES = 64
"""Of every tensor in its bucket: a view with another alignment is slow, and torch refuses some."""


@schema("weight_tensor", version=1)
class TensorEntry:
    """One tensor and its place: `nbytes` bytes at `offset` of bucket number `bucket`."""

    name: str
    dtype: str
    """A numpy name, or "bfloat16" for uint16 storage."""
    shape: tuple[int, ...]
    nbytes: int
    digest: bytes
    """See `tensor_digest`."""
    bucket: int
    offset: int

    def view(self, bucket: np.ndarray) -> np.ndarray:
        """This tensor inside its bucket's bytes ([bytes] uint8)."""
        payload = bucket[self.offset : self.offset + self.nbytes]
        return payload.view(DTYPES[self.dtype]).reshape(self.shape)


@schema("weight_delta", version=1)
class DeltaRef:
    """The changes that make `base` into `version`, as one array on the bulk plane (see `delta`)."""

    base: Version
    version: Version
    base_digest: str
    digest: str
    """`weights_digest` of `version`."""
    changed: int
    """Units: elements, or halves of those of 8 bytes."""
    payload: BulkRef
    payload_digest: bytes
    """SHA-256, so that whoever passes it on can be told from who made it."""

    def __str__(self) -> str:
        return f"the delta from {self.base} to {self.version}"


@schema("weight_manifest", version=2)
class Manifest:
    """One version, whole. It travels over the bus; the tensors do not."""

    version: Version
    digest: str
    """`weights_digest` of the tensors: what an engine must report once it holds them."""
    tensors: list[TensorEntry]
    buckets: list[BulkRef]
    deltas: list[DeltaRef] = field(default_factory=list)
    """Each begins where the one before it ends, the last ends with this version; empty: it comes whole."""
    why_whole: str = ""
    """Why no delta leads to this version."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors)

    @property
    def delta_bytes(self) -> int:
        """Of what changed since the version before; 0: it can be had whole only."""
        return self.deltas[-1].payload.nbytes if self.deltas else 0

    def check(self) -> None:
        """Raises ManifestInvalid unless every tensor lies inside its bucket and the digests add up."""
        numbers = [members[0].bucket for members in by_bucket(self.tensors)]
        if numbers != list(range(len(self.buckets))):
            raise self._invalid(f"its tensors lie in buckets {numbers} of {len(self.buckets)}")
        names = {entry.name: entry.digest for entry in self.tensors}
        if not names or len(names) != len(self.tensors):
            raise self._invalid("no tensors, or one name twice")
        if combined_digest(names) != self.digest:
            raise self._invalid("its digest is not the digest of its tensors")
        for entry in self.tensors:
            self._check_entry(entry)
        ends = [(delta.version, delta.digest) for delta in self.deltas]
        if ends[:-1] != [(delta.base, delta.base_digest) for delta in self.deltas[1:]]:
            raise self._invalid("its deltas do not follow one another")
        if ends and ends[-1] != (self.version, self.digest):
            raise self._invalid("its last delta leads elsewhere")

    def _check_entry(self, entry: TensorEntry) -> None:
        kind = DTYPES.get(entry.dtype)
        possible = kind is not None and possible_shape(entry.shape, kind.itemsize)
        if not possible or prod(entry.shape) * kind.itemsize != entry.nbytes:
            raise self._invalid(f"tensor {entry.name} has no {entry.nbytes} bytes as {entry.dtype} {entry.shape}")
        if entry.offset < 0 or entry.offset + entry.nbytes > self.buckets[entry.bucket].nbytes:
            raise self._invalid(f"tensor {entry.name} ends outside its bucket")

    def _invalid(self, why: str) -> ManifestInvalid:
        return ManifestInvalid(f"manifest of version {self.version}: {why}")


def entries_of(
    tensors: Mapping[str, np.ndarray], bucket_bytes: int, digests: Mapping[str, bytes] | None = None
) -> list[TensorEntry]:
    """The table of contents: tensors in their order, filled into buckets of at most `bucket_bytes`.

    `digests` are the tensors' where they are known already.
    A tensor that is larger than that has a bucket of its own. Raises ManifestInvalid for a dtype that can not travel.
    """
    if not tensors:
        raise ManifestInvalid("a version has no tensors")
    digests = digests or tensor_digests(tensors)
    entries: list[TensorEntry] = []
    bucket, end = 0, 0
    for name, array in tensors.items():
        dtype, plain = stored(array)
        if dtype not in DTYPES:
            raise ManifestInvalid(f"tensor {name} is {dtype}, which can not travel")
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if entries and offset + plain.nbytes > bucket_bytes:
            bucket, offset = bucket + 1, 0
        entries.append(TensorEntry(name, dtype, tuple(plain.shape), plain.nbytes, digests[name], bucket, offset))
        end = offset + plain.nbytes
    return entries


def by_bucket(entries: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
    """The entries of each bucket, in order."""
    return [list(members) for _, members in groupby(entries, key=attrgetter("bucket"))]


def digest_of_entries(entries: Sequence[TensorEntry]) -> str:
    """The digest of the model that these entries describe."""
    return combined_digest({entry.name: entry.digest for entry in entries})
