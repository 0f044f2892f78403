"""One array on its way from another host: what to ask for, and what to make of what comes. No socket, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Union

import numpy as np

from ..errors import BulkCorrupt, BulkGone
from .ref import BulkRef
from .settings import BulkSettings
from .window import ChunkWindow
from .wire import Ask, Chunk, No, digest, same

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_DAMAGED = 3
# A chunk damaged this often is no accident of the network: one side's memory is wrong, or somebody changes it.


class Incoming:
    """Once `complete`, every byte of `array` came in a chunk whose digest was right."""

    def __init__(self, ref: BulkRef, kind: Any, stream: bytes, settings: BulkSettings) -> None:
        """`kind`: the checked dtype (`ref.storage_dtype`). Takes the memory of the array."""
        self.ref = ref
        self.stream = stream
        self.array: NDArray[Any] = np.empty(ref.shape, kind)
        self._bytes: NDArray[np.uint8] = self.array.reshape(-1).view(np.uint8)
        self._window = ChunkWindow(ref.nbytes, settings.chunk_bytes, credit=settings.window_chunks,
                                   overdue_s=settings.overdue_s)
        self._counts = {"damaged": 0, "unexpected": 0}

    @property
    def complete(self) -> bool:
        return self._window.complete

    def asks(self, now: float) -> List[Ask]:
        """What to ask the owner for now."""
        return [self._ask(chunk) for chunk in self._window.ask(now)]

    def take(self, reply: Union[Chunk, No], now: float) -> None:
        """Raises BulkGone when the owner says no, BulkCorrupt when one chunk was damaged MAX_DAMAGED times."""
        if isinstance(reply, No):
            raise BulkGone(f"{self.ref}: {reply.reason}", peer=self.ref.owner, channel="bulk")
        number, rest = divmod(reply.ask.first, self._window.chunk_bytes)
        if rest or not self._window.expects(number) or reply.ask != self._ask(number):
            self._counts["unexpected"] += 1
        elif self._is_whole(reply):
            first, length = self._window.place(number)
            np.copyto(self._bytes[first:first + length], np.frombuffer(reply.payload, np.uint8))
            self._window.arrived(number, now)
        else:
            self._note_damage(number)

    def connection_broke(self) -> None:
        self._window.connection_broke()

    def next_overdue(self, otherwise: float) -> float:
        """When there will be something to ask for even if nothing comes."""
        overdue = self._window.next_overdue()
        return otherwise if overdue is None else min(overdue, otherwise)

    def progress(self) -> str:
        return f"{self._window.kept} of {self._window.chunks} chunks of {self.ref} came"

    def statistics(self) -> Dict[str, int]:
        return {**self._counts, **self._window.statistics()}

    def _ask(self, chunk: int) -> Ask:
        first, length = self._window.place(chunk)
        return Ask(self.ref.arena, self.stream, self.ref.generation, first, length)

    def _is_whole(self, chunk: Chunk) -> bool:
        if memoryview(chunk.payload).nbytes != chunk.ask.length:
            return False
        return same(chunk.digest, digest(chunk.ask, self.ref.token, chunk.payload))

    def _note_damage(self, number: int) -> None:
        self._counts["damaged"] += 1
        if self._window.damaged(number) >= MAX_DAMAGED:
            raise BulkCorrupt(f"chunk {number} has another digest, {MAX_DAMAGED} times; {self.progress()}",
                              peer=self.ref.owner, channel="bulk")
