"""Arrays of one wire through shared memory, when both ends are on one host.

The sender copies an array into its ring and sends (position, size); the receiver copies it out as it reads the message
and says up to where it has read with whatever it sends next. Two copies of 49 kB cost less than encrypting it once.
A ring belongs to one wire and ends with it: what was under way is sent again over the next one.

    position   grows for ever; the byte is at position % capacity, an array never wraps
    freed <= taken by the receiver <= next to write;  next - freed <= capacity
"""

from __future__ import annotations

import os
from typing import Any, List, Optional

from .bulk.arena import Arena, ArenaView
from .errors import BusError, CorruptFrame

SHARED_FROM_BYTES = 4096
"""Below it the copy into the message is cheaper than a place in the ring."""

LAST_POSITION = 2**62
"""Nobody gets there; what is beyond does not fit into the answer that names it."""

_ALIGNMENT_BYTES = 64


class RingWriter:
    """Never overwrites what the receiver has not read: `put` says no instead."""

    def __init__(self, capacity_bytes: int) -> None:
        self._arena = Arena(capacity_bytes)
        self._bytes = self._arena.view()
        self._capacity = self._arena.capacity_bytes
        self._next = 0
        self._freed = 0
        self.arrays = 0
        """Put so far."""

    def offer(self) -> List[Any]:
        """What the peer needs to open it: process, descriptor, token, size."""
        return [os.getpid(), self._arena.fd, self._arena.token, self._arena.size_bytes]

    def put(self, buffer: Any) -> Optional[int]:
        """The position of a copy of these bytes, or None when there is no room now."""
        nbytes = len(buffer)
        begin, freed, place = self._next, self._freed, self._next % self._capacity
        if place and (freed == begin or place + nbytes > self._capacity):
            # Not enough room before the end; or empty: the first bytes are still in the processor's cache.
            freed = begin + self._capacity - place if freed == begin else freed
            begin += self._capacity - place
        if begin + nbytes - freed > self._capacity:
            return None
        self.arrays += 1
        place = self._arena.first_byte + begin % self._capacity
        self._bytes[place:place + nbytes] = buffer
        self._freed = freed
        self._next = begin + nbytes + -nbytes % _ALIGNMENT_BYTES
        return begin

    def free(self, position: int) -> None:
        """The receiver has read everything before. Raises ValueError for what was never written."""
        if position > self._next:
            raise ValueError(f"{position} was never written")
        self._freed = max(self._freed, position)

    def close(self) -> None:
        self._bytes.release()
        self._arena.close()


class RingReader:
    """The receiver's side, without the right to write."""

    def __init__(self, offer: Any, most_bytes: Optional[int] = None) -> None:
        """Raises BusError if the offer can not be opened here; the sender then uses the socket alone.

        `most_bytes`: what one message may have in it, None: as much as the ring has.
        """
        if type(offer) is not list or [type(part) for part in offer] != [int, int, bytes, int]:
            raise BusError("no offer of a ring")
        pid, fd, token, size_bytes = offer
        self._view = ArenaView(pid, fd, token, size_bytes)
        self._capacity = size_bytes - self._view.first_byte
        self._most_bytes = self._capacity if most_bytes is None else min(self._capacity, most_bytes)
        self._taken_bytes = 0
        self.taken = 0
        """Where the last of what was read ends."""
        self.freed = 0
        """Everything before it may be overwritten."""

    def take(self, position: int, nbytes: int) -> bytes:
        """A copy of the bytes there; their place may be used again then. Raises CorruptFrame for places outside.

        A message that lies in the ring is taken before its arrays, which were put before it.
        """
        if type(position) is not int or type(nbytes) is not int or not self.freed <= position < LAST_POSITION:
            raise CorruptFrame("an array outside its ring")
        place = position % self._capacity
        if not 0 <= nbytes <= self._capacity - place:
            raise CorruptFrame("an array outside its ring")
        self._taken_bytes += nbytes
        if self._taken_bytes > self._most_bytes:
            raise CorruptFrame(f"a message with more than {self._most_bytes} bytes in its ring")
        begin = self._view.first_byte + place
        self.taken = max(self.taken, position + nbytes + -nbytes % _ALIGNMENT_BYTES)
        return self._view.mapping[begin:begin + nbytes]

    def free(self) -> int:
        """Everything taken so far may be overwritten: the message is read. Returns up to where."""
        self.freed = self.taken
        self._taken_bytes = 0
        return self.freed

    def close(self) -> None:
        self._view.close()
