"""Buckets on a device as a raw server serves them: by generation, to whoever proves to have the reference.

What a bulk store is for arrays in shared memory, without its copies: a bucket is a buffer of a flat, as long as the
version is kept, and as long as somebody reads it.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.identity import Identity, host_id
from cosmos_actor.weight_plane.flat import aside
from cosmos_actor.weight_plane.flat_pool import FlatPool, Hold

NOWHERE = -1
"""The descriptor of a reference whose bytes no other process can map as a file."""


class Found:
    """A bucket that is being read: [nbytes] uint8 on the device."""

    def __init__(self, tensor: torch.Tensor, number: tuple[int, int]) -> None:
        """`number`: of the flat in this process's life, and of the bucket in it."""
        self.tensor, self.number = tensor, number

    def __len__(self) -> int:
        return self.tensor.nbytes

    def __getitem__(self, part: slice) -> np.ndarray[Any, Any]:
        """A piece for a stream, copied to the host."""
        with aside(self.tensor.device):
            return self.tensor[part].cpu().numpy()


class _Lease(NamedTuple):
    hold: Hold
    bucket: int


class FlatStore:
    """A bucket can be asked for from its lease to its release; its bytes stay until whoever asked before is done."""

    def __init__(self, identity: Identity, pool: FlatPool) -> None:
        self.identity, self._pool = identity, pool
        self.arena_token = os.urandom(16)
        self._secret = os.urandom(32)
        self._leases: dict[int, _Lease] = {}
        self._last = 0
        self._lock = threading.Lock()

    def lease(self, hold: Hold, address: str) -> list[BulkRef]:
        """A reference to each bucket of a flat that is held. The hold passes to the leases."""
        refs = []
        for number, buffer in enumerate(hold.flat.buffers):
            own = hold if not number else self._pool.hold(hold.flat)
            with self._lock:
                self._last += 1
                self._leases[self._last] = _Lease(own, number)
            refs.append(self._reference(self._last, buffer.nbytes, address))
        return refs

    def release(self, refs: list[BulkRef]) -> None:
        """Whoever asks from now on is told that it is gone."""
        for ref in refs:
            with self._lock:
                lease = self._leases.pop(ref.generation, None)
            if lease is not None:
                lease.hold.release()

    def token(self, generation: int) -> bytes:
        """The secret of a lease, living or not."""
        return hmac.new(self._secret, generation.to_bytes(8, "little"), "sha256").digest()[:16]

    def freed(self, generation: int) -> bool:
        with self._lock:
            return generation not in self._leases

    @contextmanager
    def reading(self, generation: int) -> Iterator[Found | None]:
        """The bucket, whose memory is not used again inside; None when it was released."""
        with self._lock:
            lease = self._leases.get(generation)
            hold = None if lease is None else self._pool.hold(lease.hold.flat)
        try:
            yield None if lease is None else _found(lease)
        finally:
            if hold is not None:
                hold.release()

    def _reference(self, generation: int, nbytes: int, address: str) -> BulkRef:
        mine = self.identity
        return BulkRef(
            run_id=mine.run_id, role=mine.role, owner=mine.actor, incarnation=mine.incarnation, host_id=host_id(),
            address=address, pid=os.getpid(), fd=NOWHERE, arena=self.arena_token, arena_bytes=nbytes, offset=0,
            nbytes=nbytes, dtype="uint8", shape=(nbytes,), generation=generation, token=self.token(generation),
            digest=b"")


def _found(lease: _Lease) -> Found:
    flat = lease.hold.flat
    return Found(flat.buffers[lease.bucket], (flat.number, lease.bucket))
