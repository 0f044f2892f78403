"""The producer's store: arrays in shared memory, each as long as somebody needs it, all within one byte budget."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Deque, Dict, Iterator, Optional, Tuple

import numpy as np

from ..codec import DTYPES
from ..errors import BulkFull, BulkGone, DeadlineExceeded
from ..identity import Identity, host_id
from .allocator import FreeList
from .arena import Arena
from .leases import Lease, LeaseTable
from .ref import BulkRef, storable
from .settings import MIB, BulkSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

WRITING = "(put in progress)"
STREAMING = "(stream in progress)"
# Holders of this module's own, so that a block is never used again under a copy in either direction.
INLINE_COPY_BYTES = 4 * MIB
# A larger copy would keep the event loop from control messages for more than a millisecond.


class _Waiter:
    """A put in the queue. It leaves it once, under the store's lock: with a lease, by its own wish, or at the close."""

    def __init__(self, nbytes: int, holder: str) -> None:
        self.nbytes = nbytes
        self.holder = holder
        self.lease: Optional[Lease] = None
        self.loop = asyncio.get_running_loop()
        self.turn: asyncio.Future[None] = self.loop.create_future()

    def wake(self) -> None:
        if not self.turn.done():
            self.turn.set_result(None)


class BulkStore:
    """An array lives exactly from its put to the end of its last hold; the living ones never pass the budget.

    Safe to use from several threads. Puts that wait are served in the order they came, and no later put passes them.
    """

    def __init__(self, identity: Identity, settings: Optional[BulkSettings] = None) -> None:
        self.identity = identity
        self.settings = settings or BulkSettings()
        self.address = ""
        """Of the bulk server that serves this store to other hosts; written into every later reference."""
        self._arena = Arena(self.settings.budget_bytes)
        self._blocks = FreeList(self._arena.capacity_bytes, first_byte=self._arena.first_byte)
        self._leases = LeaseTable()
        self._waiting: Deque[_Waiter] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._secret = os.urandom(32)
        self._counts = {"puts": 0, "put_bytes": 0, "waits": 0, "refused": 0, "dropped_leases": 0}
        self._arena.fault_in(self.settings.prefault_bytes)

    @property
    def arena_token(self) -> bytes:
        """What the `arena` of every reference from this store is equal to."""
        return self._arena.token

    def try_put(self, array: Any, *, holder: str, dtype: str = "", digest: bool = False) -> BulkRef:
        """Copy `array` in, with `holder` as its first holder. Raises BulkFull when there is no room right now.

        `dtype="bfloat16"` says that a uint16 array holds bfloat16 bits; `digest` adds the SHA-256 to the reference.
        """
        plain, name = storable(array, dtype)
        with self._lock:
            lease = None if self._waiting else self._reserve(plain.nbytes, holder)
            if lease is None:
                self._counts["refused"] += 1
                raise BulkFull(f"no room for {plain.nbytes} bytes: {self._state()}", setting="bulk.budget_bytes")
        return self._write(lease, plain, name, digest)

    async def put(
        self, array: Any, *, holder: str, deadline_s: float, dtype: str = "", digest: bool = False
    ) -> BulkRef:
        """Like `try_put`, waiting for room. A large copy runs in a thread.

        Raises DeadlineExceeded naming `bulk.budget_bytes` and who fills it; BulkFull at once for what can never fit.
        """
        plain, name = storable(array, dtype)
        lease = await self._wait_for_room(plain.nbytes, holder, deadline_s)
        if plain.nbytes <= INLINE_COPY_BYTES:
            return self._write(lease, plain, name, digest)
        writing = asyncio.get_running_loop().run_in_executor(None, self._write, lease, plain, name, digest)
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            self._let_go(lease.generation, holder)
            raise

    def add_holder(self, ref: BulkRef, holder: str) -> None:
        """One more hold on the array. Raises BulkGone when it ended already."""
        with self._lock:
            if ref.arena != self._arena.token or not self._leases.hold(ref.generation, holder):
                raise BulkGone(f"{ref} ended before {holder} asked to hold it", peer=ref.owner)

    def release(self, ref: BulkRef, holder: str) -> bool:
        """End one hold. Ending what is not held changes nothing, is counted, and returns False."""
        return self.give_back(ref.generation if ref.arena == self._arena.token else 0, holder)

    def give_back(self, generation: int, holder: str, count: int = 1) -> bool:
        """End `count` holds on the array of this generation, as `release` does."""
        with self._lock:
            lease = self._leases.find(generation)
            was_held = lease is not None and holder in lease.holders
            for _ in range(min(count, lease.holders.get(holder, 0)) if lease is not None and was_held else 1):
                self._end(self._leases.let_go(generation, holder))
            return was_held

    def drop_holder(self, holder: str) -> int:
        """End every hold of a peer that is gone; the number of arrays that ended with it."""
        with self._lock:
            ended = self._leases.drop(holder)
            for lease in ended:
                self._end(lease)
            self._counts["dropped_leases"] += len(ended)
            return len(ended)

    def token(self, generation: int) -> bytes:
        """The secret of a lease, living or not; nobody who was not given the reference can know it."""
        return hmac.new(self._secret, generation.to_bytes(8, "little"), "sha256").digest()[:16]

    @contextmanager
    def reading(self, generation: int) -> Iterator[Optional[NDArray[np.uint8]]]:
        """The bytes of a living array, which stay while the block runs; None when it ended or is being written."""
        with self._lock:
            lease = self._leases.find(generation)
            if lease is not None and WRITING in lease.holders:
                lease = None
            if lease is not None:
                self._leases.hold(generation, STREAMING)
        try:
            yield None if lease is None else self._arena.block(lease.offset, lease.nbytes)
        finally:
            if lease is not None:
                self._let_go(generation, STREAMING)

    def statistics(self) -> Dict[str, Any]:
        with self._lock:
            return {
                **self._blocks.statistics(),
                **self._leases.statistics(),
                **self._counts,
                "waiting_puts": len(self._waiting),
                "held_by": self._leases.holders(),
            }

    def close(self) -> None:
        """End every lease and every wait. What readers see at that moment stays until they drop it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for lease in self._leases.revoke_all():
                self._arena.mark(lease.offset, 0)
            waiting, self._waiting = self._waiting, deque()
            for waiter in waiting:
                self._wake(waiter)
            self._arena.close()

    async def _wait_for_room(self, nbytes: int, holder: str, deadline_s: float) -> Lease:
        with self._lock:
            if not self._blocks.fits_when_empty(nbytes):
                raise BulkFull(f"{nbytes} bytes are more than the whole store of {self._arena.capacity_bytes}",
                               setting="bulk.budget_bytes")
            lease = None if self._waiting else self._reserve(nbytes, holder)
            if lease is not None:
                return lease
            waiter = _Waiter(nbytes, holder)
            self._waiting.append(waiter)
            self._counts["waits"] += 1
        return await self._wait_for_turn(waiter, deadline_s)

    async def _wait_for_turn(self, waiter: _Waiter, deadline_s: float) -> Lease:
        try:
            await asyncio.wait([waiter.turn], timeout=deadline_s)
        except asyncio.CancelledError:
            with self._lock:
                self._leave_queue(waiter)
            raise
        with self._lock:
            if waiter.lease is not None:
                return waiter.lease
            self._refuse_if_closed()
            state = self._state()
            self._leave_queue(waiter)
        raise DeadlineExceeded(f"no room for {waiter.nbytes} bytes within {deadline_s:g} s: {state}",
                               peer=waiter.holder, setting="bulk.budget_bytes")

    def _write(self, lease: Lease, plain: NDArray[Any], dtype: str, digest: bool) -> BulkRef:
        """Copy the bytes in, then show them to readers. The copy needs no lock: the WRITING hold guards the block."""
        with self._lock:
            self._refuse_if_closed()
            block = self._arena.block(lease.offset, lease.nbytes)
        try:
            np.copyto(block.view(DTYPES[dtype]).reshape(plain.shape), plain)
            found = hashlib.sha256(block.data).digest() if digest else b""
        except BaseException:
            with self._lock:
                self._end(self._leases.revoke(lease.generation))
            raise
        with self._lock:
            self._refuse_if_closed()
            self._arena.mark(lease.offset, lease.generation)
            self._end(self._leases.let_go(lease.generation, WRITING))
        return self._reference(lease, dtype, plain.shape, found)

    def _reference(self, lease: Lease, dtype: str, shape: Tuple[int, ...], digest: bytes) -> BulkRef:
        mine, arena = self.identity, self._arena
        return BulkRef(
            run_id=mine.run_id, role=mine.role, owner=mine.actor, incarnation=mine.incarnation,
            host_id=host_id(), address=self.address, pid=os.getpid(), fd=arena.fd,
            arena=arena.token, arena_bytes=arena.size_bytes, offset=lease.offset, nbytes=lease.nbytes,
            dtype=dtype, shape=tuple(shape), generation=lease.generation, token=self.token(lease.generation),
            digest=digest,
        )

    def _let_go(self, generation: int, holder: str) -> None:
        with self._lock:
            self._end(self._leases.let_go(generation, holder))

    # From here on the caller has the lock.

    def _reserve(self, nbytes: int, holder: str) -> Optional[Lease]:
        """A lease of `holder` that also lives until its bytes are written, or None without room."""
        self._refuse_if_closed()
        offset = self._blocks.allocate(nbytes)
        if offset is None:
            return None
        lease = self._leases.grant(offset, nbytes, holder)
        self._leases.hold(lease.generation, WRITING)
        self._counts["puts"] += 1
        self._counts["put_bytes"] += nbytes
        return lease

    def _end(self, lease: Optional[Lease]) -> None:
        if lease is not None and not self._closed:
            self._arena.mark(lease.offset, 0)
            self._blocks.free(lease.offset)
            self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            first.lease = self._reserve(first.nbytes, first.holder)
            if first.lease is None:
                return
            self._waiting.popleft()
            self._wake(first)

    def _wake(self, waiter: _Waiter) -> None:
        try:
            waiter.loop.call_soon_threadsafe(waiter.wake)
        except RuntimeError:  # Its loop was closed under it: nobody is left to take the lease.
            self._leave_queue(waiter)

    def _leave_queue(self, waiter: _Waiter) -> None:
        if waiter.lease is not None:
            self._end(self._leases.revoke(waiter.lease.generation))
        elif waiter in self._waiting:
            self._waiting.remove(waiter)
            self._serve_waiting()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise BulkGone("the bulk store is closed", peer=self.identity.actor)

    def _state(self) -> str:
        held = sorted(self._leases.holders().items(), key=lambda item: -item[1])
        most = ", most by {} ({} bytes)".format(*held[0]) if held else ""
        return (f"{self._blocks.used_bytes} of {self._arena.capacity_bytes} bytes are in use{most}, "
                f"{len(self._waiting)} puts wait")
