"""Copies buckets out of the publisher's own memory on one GPU, which is mapped once (CUDA IPC). Imports torch.

    reader ──HANDLE──> publisher: [flat, bucket, handle]        the handle the first time only
    reader: map ──> copy into its own flat                      the next version in that flat: copy at once
    reader ──LIVES──> publisher                                 after bytes that were wrong: freed, or damaged?

The thread of each publisher (see `asking`) asks, maps and copies. What is mapped lives as long as its connection. On a
CPU the memory is that of the host; the rest is the same.
"""

from __future__ import annotations

from typing import Any

import msgpack
import torch

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.errors import BulkGone, BusError, CorruptFrame
from cosmos_actor.weight_plane.flat import aside
from cosmos_actor.weight_plane.flat_pool import BUFFERS
from cosmos_actor.weight_plane.transports import raw_wire as wire
from cosmos_actor.weight_plane.transports.asking import Asker, AskingTransport, Wish
from cosmos_actor.weight_plane.transports.handles import opened
from cosmos_actor.weight_plane.transports.interface import TransportLost
from cosmos_actor.weight_plane.transports.pair import gone


class MappedTransport(AskingTransport):
    """Within a GPU, at the pace of its memory."""

    counted = "copied"

    def __init__(self, settings: BulkSettings, device: str = "cuda") -> None:
        super().__init__(settings, torch.device(device))

    def make_asker(self, address: str) -> Asker:
        return _Talk(self, address)

    def late(self, asker: Asker, deadline_s: float) -> str:
        return f"was not copied out of the publisher's memory within {deadline_s:g} s ({asker.doing})"

    async def lives(self, ref: BulkRef, *, deadline_s: float) -> None:
        """See `DeviceTransport.lives`."""
        await self.ask(ref, None, deadline_s)

    def statistics(self) -> dict[str, Any]:
        return {**self.counts, "publishers": len(self._askers)}


class _Talk(Asker):
    """What is said with one publisher, and what is mapped of it."""

    thread_name = "mapped"
    asked_ahead = 16

    def __init__(self, transport: MappedTransport, address: str) -> None:
        super().__init__(address, transport.settings.overdue_s)
        self._transport = transport
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}

    def fulfil(self, batch: list[Wish]) -> None:
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
            self.drop()
            batch = [wish for wish in batch if not wish.told]
            if not again:
                break
        for wish in batch:
            wish.tell(TransportLost(f"{wish.ref} was not copied while {self.doing}: {said}", peer=wish.ref.owner,
                                    channel="weights"))

    def _take(self, batch: list[Wish]) -> None:
        """All of them are asked for at once, and copied without a wait between them."""
        connection, device = self._connection or self.dial(), self._transport.device
        self.doing = "the publisher was asked for it"
        asks = [connection.ask(wire.LIVES if wish.target is None else wire.HANDLE, wish.ref, 0, wish.ref.nbytes)
                for wish in batch]
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
            wish.tell()

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

    def look(self) -> None:
        """What is mapped of a publisher that is gone keeps a whole version of a GPU's memory taken, which its
        successor may need."""
        if self._connection is not None and gone(self._connection.socket):
            self.drop()

    def _forget_old(self) -> None:
        """A publisher has BUFFERS flats; what was mapped of one that it made anew is of no use."""
        flats = sorted({flat for flat, _ in self._mapped})
        for old in flats[:-BUFFERS]:
            for number in [number for number in self._mapped if number[0] == old]:
                del self._mapped[number]

    def drop(self) -> None:
        """See Asker.drop. What is mapped goes with it."""
        self._mapped.clear()
        super().drop()


def _unpacked(said: bytes) -> tuple[int, int, Any]:
    try:
        flat, bucket, handle = msgpack.unpackb(said)
        return int(flat), int(bucket), handle
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptFrame(f"this is no answer about a bucket's memory: {error}", channel="weights") from error
