"""Which chunk of a stream is asked for next. Pure: the time comes in as a number, requests go out as numbers.

    wanted --ask--> asked --arrived--> kept
       ^                |
       +---- overdue, or arrived damaged
"""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, Optional, Tuple


class ChunkWindow:
    """Never more than `credit` chunks are on their way, and every chunk is asked for until it was kept.

    The receiver gives the credit: a sender that only answers cannot bury a slow peer.
    """

    def __init__(self, nbytes: int, chunk_bytes: int, *, credit: int, overdue_s: float) -> None:
        """`nbytes` in chunks of `chunk_bytes`, the last one shorter; not here after `overdue_s` is lost."""
        if chunk_bytes <= 0 or credit <= 0:
            raise ValueError(f"chunks of {chunk_bytes} bytes with a credit of {credit} move nothing")
        self.nbytes = nbytes
        self.chunk_bytes = chunk_bytes
        self.chunks = -(-nbytes // chunk_bytes)
        self.kept = 0
        self.asked_again = 0
        self._credit = credit
        self._overdue_s = overdue_s
        self._wanted: Deque[int] = deque(range(self.chunks))
        self._asked: Dict[int, float] = {}
        self._damaged: Dict[int, int] = {}

    @property
    def complete(self) -> bool:
        return self.kept == self.chunks

    def place(self, chunk: int) -> Tuple[int, int]:
        """(first byte, length in bytes) of a chunk."""
        first = chunk * self.chunk_bytes
        return first, min(self.chunk_bytes, self.nbytes - first)

    def ask(self, now: float) -> List[int]:
        """The chunks to ask for now; they are on their way from here on."""
        self._give_up_overdue(now)
        asked = []
        while self._wanted and len(self._asked) < self._credit:
            chunk = self._wanted.popleft()
            self._asked[chunk] = now
            asked.append(chunk)
        return asked

    def expects(self, chunk: int) -> bool:
        """Whether this chunk is on its way. A late second copy of one that was kept is not expected."""
        return chunk in self._asked

    def arrived(self, chunk: int, now: float) -> None:
        """The chunk is here and whole. One that arrives shows the others to be on their way as well."""
        if self._asked.pop(chunk, None) is None:
            return
        self.kept += 1
        self._asked = {other: now for other in self._asked}

    def damaged(self, chunk: int) -> int:
        """The chunk came with other bytes than were sent and is wanted again; how often that was so for this one."""
        if self._asked.pop(chunk, None) is not None:
            self._wanted.appendleft(chunk)
            self._damaged[chunk] = self._damaged.get(chunk, 0) + 1
            self.asked_again += 1
        return self._damaged.get(chunk, 0)

    def connection_broke(self) -> None:
        """Nothing that was asked for will come; all of it is wanted again."""
        self._take_back(list(self._asked))

    def next_overdue(self) -> Optional[float]:
        """When the oldest request becomes overdue, or None with nothing on its way."""
        return min(self._asked.values()) + self._overdue_s if self._asked else None

    def statistics(self) -> Dict[str, int]:
        return {
            "chunks": self.chunks,
            "kept": self.kept,
            "on_their_way": len(self._asked),
            "asked_again": self.asked_again,
        }

    def _give_up_overdue(self, now: float) -> None:
        late = [chunk for chunk, asked in self._asked.items() if now - asked >= self._overdue_s]
        if late:
            self._take_back(late)
            self._overdue_s *= 2  # A link so slow that it only looks dead must not be buried in repeated asks.

    def _take_back(self, chunks: List[int]) -> None:
        for chunk in reversed(chunks):
            del self._asked[chunk]
            self._wanted.appendleft(chunk)
        self.asked_again += len(chunks)
