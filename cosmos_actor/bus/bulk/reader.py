"""The reader: a view where the producer's memory can be mapped, a verified stream where it cannot."""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional

import numpy as np

from ..errors import BulkCorrupt, BulkGone
from ..identity import host_id
from .arena import ArenaRefused, ArenaView, Viewed
from .ref import BulkRef, storage_dtype
from .settings import MIB, BulkSettings
from .streams import StreamClient

if TYPE_CHECKING:
    from numpy.typing import NDArray

INLINE_DIGEST_BYTES = 1 * MIB
# A larger digest would keep the event loop from control messages for about a millisecond.


class BulkReader:
    """`fetch` returns the bytes that were put under the reference, or raises; nothing in between.

    Arrays are read-only. On the producer's host they are its own memory, mapped without the right to write, and stay
    what they are for as long as the lease lives: `check` after the last look at one tells whether it did.
    """

    def __init__(self, settings: Optional[BulkSettings] = None, streams: Optional[StreamClient] = None) -> None:
        """Without `streams` only producers on this host can be read."""
        self.settings = settings or BulkSettings()
        self._streams = streams
        self._arenas: Dict[bytes, _Arena] = {}
        self._counts = {"views": 0, "view_bytes": 0, "streamed": 0, "streamed_bytes": 0}

    async def fetch(
        self, ref: BulkRef, *, deadline_s: float, silent_s: Optional[float] = None, verify: bool = False,
        on_drop: Optional[Callable[[], None]] = None
    ) -> NDArray[Any]:
        """The array, read-only. bfloat16 comes as uint16 bits.

        `on_drop` is called once the lease is not needed any more: in the thread that drops the last view of the
        producer's memory, or here when the array is a copy. Not when this raises.
        `verify` compares it with the digest in the reference (`put(digest=True)`); the chunks of a stream always are.
        Raises BulkGone when the lease or the owner ended, BulkCorrupt when the bytes are others, DeadlineExceeded with
        the progress of the stream, also when no chunk of it came for `silent_s`.
        """
        kind = storage_dtype(ref, self.settings.max_array_bytes)
        arena = self._arena(ref)
        if arena.view is None:
            found = await self._stream(ref, kind, arena.refusal, deadline_s, silent_s)
        else:
            found = self._look(arena.view, ref, kind)
        if verify:
            await _verify(ref, found)
        if on_drop is not None:
            _when_dropped(found, on_drop)
        return found.view(np.ndarray)

    def is_local(self, ref: BulkRef) -> bool:
        """Whether `fetch` gives a view of the producer's memory, without copying a byte."""
        return self._arena(ref).view is not None

    def check(self, ref: BulkRef) -> None:
        """Raises BulkGone if a view of this array may have changed by now. What was streamed stays."""
        arena = self._arenas.get(ref.arena)
        if arena is not None and arena.view is not None:
            _check_generation(arena.view, ref, "the lease ended while it was used")

    def forget(self, owner: str, incarnation: str) -> None:
        """This life of the owner is over: streams from it end with BulkGone, its memory goes with the last view."""
        for token in [token for token, arena in self._arenas.items() if arena.owner == (owner, incarnation)]:
            self._arenas.pop(token).close()
        if self._streams is not None:
            self._streams.forget(owner, incarnation)

    def statistics(self) -> Dict[str, Any]:
        refused = [arena.refusal for arena in self._arenas.values() if arena.view is None]
        streams = {} if self._streams is None else self._streams.statistics()
        return {**self._counts, "arenas": len(self._arenas), "refused": refused, "streams": streams}

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        if self._streams is not None:
            self._streams.close()

    def _arena(self, ref: BulkRef) -> _Arena:
        known = self._arenas.get(ref.arena)
        if known is None:
            self._drop_orphans()
            known = self._arenas[ref.arena] = _Arena(ref)
        return known

    def _drop_orphans(self) -> None:
        """A new producer appeared: a good moment to let go of the memory of those that died."""
        for token in [token for token, arena in self._arenas.items() if arena.view is None or arena.view.orphaned()]:
            self._arenas.pop(token).close()

    def _look(self, view: ArenaView, ref: BulkRef, kind: Any) -> NDArray[Any]:
        _check_generation(view, ref, "the lease ended")
        self._counts["views"] += 1
        self._counts["view_bytes"] += ref.nbytes
        return view.array(ref.offset, kind, ref.shape)

    async def _stream(
        self, ref: BulkRef, kind: Any, refusal: str, deadline_s: float, silent_s: Optional[float]
    ) -> NDArray[Any]:
        if self._streams is None or not ref.address:
            raise BulkGone(f"{ref} can be read on its own host only: {refusal}", peer=ref.owner)
        found = await self._streams.fetch(ref, kind, deadline_s, silent_s)
        found.flags.writeable = False
        self._counts["streamed"] += 1
        self._counts["streamed_bytes"] += ref.nbytes
        return found


class _Arena:
    """One peer's arena as this process sees it: mapped, or the reason why not."""

    def __init__(self, ref: BulkRef) -> None:
        self.owner = (ref.owner, ref.incarnation)
        self.view: Optional[ArenaView] = None
        self.refusal = "it is another host"
        if ref.host_id == host_id():
            try:
                self.view = ArenaView(ref.pid, ref.fd, ref.arena, ref.arena_bytes)
            except ArenaRefused as error:
                self.refusal = str(error)

    def close(self) -> None:
        if self.view is not None:
            self.view.close()


def _when_dropped(found: NDArray[Any], on_drop: Callable[[], None]) -> None:
    if isinstance(found, Viewed):
        weakref.finalize(found, on_drop).atexit = False
    else:
        on_drop()


def _check_generation(view: ArenaView, ref: BulkRef, otherwise: str) -> None:
    if view.generation(ref.offset) != ref.generation:
        raise BulkGone(f"{ref}: {otherwise}", peer=ref.owner)


async def _verify(ref: BulkRef, array: NDArray[Any]) -> None:
    if not ref.digest:
        raise BulkCorrupt(f"{ref} carries no digest to compare with: put(digest=True)", peer=ref.owner)
    if array.nbytes <= INLINE_DIGEST_BYTES:
        found = _digest(array)
    else:
        found = await asyncio.get_running_loop().run_in_executor(None, _digest, array)
    if found != ref.digest:
        raise BulkCorrupt(f"{ref} has another digest than it was put with", peer=ref.owner)


def _digest(array: NDArray[Any]) -> bytes:
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).digest()
