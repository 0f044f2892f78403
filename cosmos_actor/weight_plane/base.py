"""The newest version in a subscriber's own memory, which a delta makes the next one of, in place.

It costs the memory of one published model, and 1/4096 of it for the sums of its blocks. Whoever still holds tensors of
the version before keeps them as they are: then the delta is applied to a copy.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cosmos_actor.weight_plane.delta import UNITS, Layout, Part, check_order, expand, unpack
from cosmos_actor.weight_plane.digest import (
    BLOCK_BYTES,
    LANES,
    add_changes,
    block_count,
    combined_digest,
    digest_of_sums,
    raw,
    stored,
    threads,
)
from cosmos_actor.weight_plane.errors import DeltaInvalid
from cosmos_actor.weight_plane.manifest import DeltaRef
from cosmos_actor.weight_plane.version import Version

OWN_REFERENCES = 2
"""To the buffer when nobody holds a view of it: this object's and that of the call that counts them."""


class _Write(NamedTuple):
    """New units of one part, looked at and not yet written."""

    units: np.ndarray
    positions: np.ndarray
    values: np.ndarray

    def do(self) -> None:
        self.units[self.positions] = self.values


class Base:
    """`apply` takes a delta whole or not at all: its digest is known before the first byte is written.

    All tensors lie in one buffer, and the sums of their blocks in one array, as `delta.Layout` says.
    """

    def __init__(self, version: Version, tensors: Mapping[str, np.ndarray], sums: Mapping[str, np.ndarray]) -> None:
        """Copies the tensors. `sums` are their `block_sums`, verified."""
        plain = {name: stored(array) for name, array in tensors.items()}
        self._layout = Layout({name: (array.nbytes, array.itemsize) for name, (_, array) in plain.items()})
        self._buffer = np.zeros(self._layout.blocks * BLOCK_BYTES, np.uint8)
        self._sums = np.zeros((self._layout.blocks, LANES), np.int64)
        self._facts = {name: (kind, array.shape) for name, (kind, array) in plain.items()}
        self._dtypes = {name: array.dtype for name, (_, array) in plain.items()}
        self.version = version
        for name, (_, array) in plain.items():
            place = self._layout.places[name]
            begin = place.block * BLOCK_BYTES
            self._buffer[begin : begin + place.nbytes] = raw(array)
            self._sums[place.block : place.block + len(sums[name])] = sums[name]
        self.digest = self._digest(self._sums)
        self._lock = threading.Lock()

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Name -> view of the buffer."""
        found = {}
        for name, place in self._layout.places.items():
            begin = place.block * BLOCK_BYTES
            payload = self._buffer[begin : begin + place.nbytes]
            found[name] = payload.view(self._dtypes[name]).reshape(self._facts[name][1])
        return found

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def apply(self, ref: DeltaRef, payload: np.ndarray) -> None:
        """Become `ref.version`. Raises DeltaInvalid, and is then what it was."""
        delta = unpack(payload)
        told = (ref.base.epoch, ref.base.step), (ref.version.epoch, ref.version.step), ref.base_digest, ref.digest
        if (delta.base, delta.version, delta.base_digest, delta.digest) != told:
            raise DeltaInvalid(f"the delta says that it leads from {delta.base} to {delta.version}, not {ref}")
        with self._lock:
            if self.version != ref.base or self.digest != ref.base_digest:
                raise DeltaInvalid(f"{ref} does not begin with {self.version}, which is held")
            check_order(delta)
            self._take(delta.parts, ref)

    def _take(self, parts: Sequence[Part], ref: DeltaRef) -> None:
        if sys.getrefcount(self._buffer) > OWN_REFERENCES:
            self._buffer = self._buffer.copy()
        sums = self._sums.copy()
        writes = list(threads().map(lambda part: self._look(part, sums), parts))
        if self._digest(sums) != ref.digest:
            raise DeltaInvalid(f"{ref} does not lead to its digest {ref.digest[:16]}")
        list(threads().map(_Write.do, writes))
        self._sums = sums
        self.version, self.digest = ref.version, ref.digest

    def _look(self, part: Part, sums: np.ndarray) -> _Write:
        changes = expand(part, self._layout)
        units = self._buffer[part.block * BLOCK_BYTES :].view(UNITS[part.unit])
        old = units[changes.positions]
        new = old + changes.differences
        add_changes(sums[part.block :], changes.positions, old, new)
        return _Write(units, changes.positions, new)

    def _digest(self, sums: np.ndarray) -> str:
        """Of all tensors, if their blocks have these sums."""
        found = {}
        for name, place in self._layout.places.items():
            end = place.block + block_count(place.nbytes)
            found[name] = digest_of_sums(*self._facts[name], sums[place.block : end])
        return combined_digest(found)
