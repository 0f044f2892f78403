"""Copies buckets out of the publisher's own memory on one GPU, which is mapped once (CUDA IPC). Imports torch.

    reader ──HANDLE──> publisher: [flat, bucket, handle]        the handle the first time only
    reader: map ──> copy into its own flat                      the next version in that flat: copy at once
    reader ──LIVES──> publisher                                 after bytes that were wrong: freed, or damaged?

A daemon thread for each publisher asks, maps and copies. What is mapped lives as long as its connection. On a CPU the
memory is that of the host; the rest is the same.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from typing import Any

import msgpack
import numpy as np
import torch

from cosmos_actor.bus.bulk.ref import BulkRef, storage_dtype
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.errors import BulkGone, BusError, CorruptFrame, DeadlineExceeded
from cosmos_actor.weight_plane.flat import aside
from cosmos_actor.weight_plane.flat_pool import BUFFERS
from cosmos_actor.weight_plane.transports import raw_wire as wire
from cosmos_actor.weight_plane.transports.handles import opened
from cosmos_actor.weight_plane.transports.interface import TransportLost
from cosmos_actor.weight_plane.transports.outcome import Outcome
from cosmos_actor.weight_plane.transports.pair import gone
from cosmos_actor.weight_plane.transports.raw_connection import RawConnection

CLOSE_WITHIN_S = 2.0
"""For a thread to end: one that is in the midst of something of torch's when the interpreter ends takes it down."""
IDLE_S = 60.0
"""Without work for so long the connection, and what is mapped, is given up: the server would hang up later."""
ASKED_AHEAD = 16
"""Buckets asked for at a time: a copy within a GPU takes little longer than a question and its answer."""
LOOK_S = 1.0
"""Between two looks whether the publisher is gone: what is mapped of it keeps a whole version of a GPU's memory taken,
which its successor may need."""


class MappedTransport:
    """A fetch ends within its deadline: whole, gone, lost with the publisher, or out of time."""

    def __init__(self, settings: BulkSettings, device: str = "cuda") -> None:
        self.settings, self.device = settings, torch.device(device)
        self._talks: dict[str, _Talk] = {}
        self.counts: Counter[str] = Counter()

    async def fetch_into(self, ref: BulkRef, target: torch.Tensor, *, deadline_s: float) -> None:
        """See `DeviceTransport.fetch_into`."""
        storage_dtype(ref, self.settings.max_array_bytes)
        await self._do(ref, target, deadline_s)
        self.counts["copied"] += 1
        self.counts["copied_bytes"] += ref.nbytes

    async def fetch(self, ref: BulkRef, *, deadline_s: float, silent_s: float | None = None) -> np.ndarray:
        """The array in the host's memory."""
        kind = storage_dtype(ref, self.settings.max_array_bytes)
        target = torch.empty(ref.nbytes, dtype=torch.uint8, device=self.device)
        await self.fetch_into(ref, target, deadline_s=min(deadline_s, silent_s or deadline_s))
        array: np.ndarray = target.cpu().numpy().view(kind).reshape(ref.shape)
        array.flags.writeable = False
        return array

    async def lives(self, ref: BulkRef, *, deadline_s: float) -> None:
        """See `DeviceTransport.lives`."""
        await self._do(ref, None, deadline_s)

    def check(self, ref: BulkRef) -> None:
        """What was copied stays; whether it was still there to be copied, `lives` tells."""

    def statistics(self) -> dict[str, Any]:
        return {**self.counts, "publishers": len(self._talks)}

    def close(self) -> None:
        for talk in self._talks.values():
            talk.leave()
        until = time.monotonic() + CLOSE_WITHIN_S
        for talk in self._talks.values():
            talk.thread.join(max(0.0, until - time.monotonic()))
        self._talks.clear()

    async def _do(self, ref: BulkRef, target: torch.Tensor | None, deadline_s: float) -> None:
        talk = self._talks.get(ref.address)
        if talk is None or not talk.take_on():
            talk = self._talks[ref.address] = _Talk(self, ref.address)
            talk.take_on()
        wish = _Wish(ref, target)
        talk.wishes.put(wish)
        try:
            if await wish.outcome.wait(deadline_s):
                return wish.outcome.take()
        finally:
            wish.ended = True
            wish.outcome.leave()
        self._talks.pop(ref.address, None)
        talk.leave()
        raise DeadlineExceeded(f"{ref} was not copied out of the publisher's memory within {deadline_s:g} s"
                               f" ({talk.doing})", peer=ref.owner, channel="weights", setting="weights.deadline_s")


class _Wish:
    """A bucket into `target`, or without one whether it is still there."""

    def __init__(self, ref: BulkRef, target: torch.Tensor | None) -> None:
        self.ref, self.target = ref, target
        self.kind = wire.LIVES if target is None else wire.HANDLE
        self.told = self.ended = False
        self.outcome: Outcome[None] = Outcome()

    def tell(self, error: BusError | None) -> None:
        self.told = True
        if error is None:
            self.outcome.bring(None)
        else:
            self.outcome.fail(error)


class _Talk:
    """The thread that asks one publisher, and what it has mapped of it."""

    def __init__(self, transport: MappedTransport, address: str) -> None:
        self.wishes: queue.SimpleQueue[_Wish | None] = queue.SimpleQueue()
        self.doing = "not begun"
        self._transport, self._address = transport, address
        self._connection: RawConnection | None = None
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}
        self._lock = threading.Lock()
        self._over = False
        self._due = 0
        self.thread = threading.Thread(target=self._run, name="mapped", daemon=True)
        self.thread.start()

    def take_on(self) -> bool:
        """Whether it will do what comes next; False once it has ended."""
        with self._lock:
            self._due += not self._over
            return not self._over

    def leave(self) -> None:
        """End as soon as it can; a wait on the connection ends now."""
        with self._lock:
            self._over = True
        self.wishes.put(None)
        connection = self._connection
        if connection is not None:
            connection.close()

    def _run(self) -> None:
        while (first := self._next()) is not None:
            batch = [first]
            while len(batch) < ASKED_AHEAD and (more := self._one_more()) is not None:
                batch.append(more)
            self._fulfil([wish for wish in batch if not wish.ended])
            with self._lock:
                self._due -= len(batch)
        self._drop()

    def _fulfil(self, batch: list[_Wish]) -> None:
        """A connection that was there before may have ended unnoticed: then once more, over a new one."""
        for again in ([True] if self._connection is not None else []) + [False]:
            if not batch:
                return
            try:
                return self._take(batch)
            except (OSError, CorruptFrame) as error:
                said = error.text if isinstance(error, BusError) else str(error) or type(error).__name__
            except Exception as error:  # The outermost loop of this thread: whoever waits is told instead of hanging.
                said, again = repr(error), False
            self._drop()
            batch = [wish for wish in batch if not wish.told]
            if not again:
                break
        for wish in batch:
            wish.tell(TransportLost(f"{wish.ref} was not copied while {self.doing}: {said}", peer=wish.ref.owner,
                                    channel="weights"))

    def _take(self, batch: list[_Wish]) -> None:
        """All of them are asked for at once, and copied without a wait between them."""
        if self._connection is None:
            self.doing = f"{self._address} was dialled"
            self._connection = RawConnection(self._address, self._transport.settings.overdue_s)
        connection, device = self._connection, self._transport.device
        self.doing = "the publisher was asked for it"
        asks = [connection.ask(wish.kind, wish.ref, 0, wish.ref.nbytes) for wish in batch]
        done, problem = [], None
        with aside(device):  # whose end waits for what is being copied, before anything of it is unmapped
            try:
                for wish, ask in zip(batch, asks, strict=True):
                    self.doing = "the publisher was asked for it"
                    try:
                        said = connection.text(ask, wish.ref)
                    except BulkGone as error:
                        wish.tell(error)
                        continue
                    if wish.target is not None:
                        self._copy(wish.ref, wish.target, said)
                    done.append(wish)
            except Exception as error:
                problem = error
        if problem is not None:
            raise problem
        for wish in done:
            wish.tell(None)

    def _copy(self, ref: BulkRef, target: torch.Tensor, said: bytes) -> None:
        """Asked of the device's current stream."""
        flat, bucket, handle = _unpacked(said)
        if handle is not None:
            self.doing = "its memory was being mapped"
            self._mapped[flat, bucket] = opened(handle, self._transport.device)
            self._transport.counts["mapped"] += 1
            self._forget_old()
        source = self._mapped.get((flat, bucket))
        if source is None or source.nbytes != ref.nbytes:
            raise CorruptFrame(f"bucket {bucket} of flat {flat} is not mapped with {ref.nbytes} bytes")
        self.doing = "it was being copied"
        target.copy_(source)

    def _next(self) -> _Wish | None:
        idle_since = time.monotonic()
        while True:
            try:
                return self.wishes.get(timeout=LOOK_S)
            except queue.Empty:
                if self._connection is not None and gone(self._connection.socket):
                    self._drop()
                if time.monotonic() - idle_since < IDLE_S:
                    continue
                with self._lock:
                    if not self._due:
                        self._over = True
                        return None

    def _one_more(self) -> _Wish | None:
        try:
            wish = self.wishes.get_nowait()
        except queue.Empty:
            return None
        if wish is None:
            self.wishes.put(None)
        return wish

    def _forget_old(self) -> None:
        """A publisher has BUFFERS flats; what was mapped of one that it made anew is of no use."""
        flats = sorted({flat for flat, _ in self._mapped})
        for old in flats[:-BUFFERS]:
            for number in [number for number in self._mapped if number[0] == old]:
                del self._mapped[number]

    def _drop(self) -> None:
        self._mapped.clear()
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _unpacked(said: bytes) -> tuple[int, int, Any]:
    try:
        flat, bucket, handle = msgpack.unpackb(said)
        return int(flat), int(bucket), handle
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptFrame(f"this is no answer about a bucket's memory: {error}", channel="weights") from error
