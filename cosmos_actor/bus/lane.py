"""The short way of a wire between two processes of one host: a pipe, past libzmq's threads and its encryption.

Each side makes a pipe that it reads, and names it in its introduction; the other opens it through /proc, as it does the
ring. A record is a head, and the message if it is small; a larger one lies in the ring. What fits neither goes by the
socket. The messages of a wire are numbered over both ways, so that the receiver takes them in the order of sending.
"""

from __future__ import annotations

import asyncio
import os
import stat
from struct import Struct
from typing import Any, Callable, Dict, List, Optional, Sequence

from .errors import BusError, CorruptFrame
from .ring import RingWriter

NUMBER = Struct("<Q")
"""The last frame of a message that went by the socket beside a lane."""

_RECORD = Struct("<QQI")
"""Number of the message; its position in the ring, or _INLINE; its size."""
_INLINE = 2**64 - 1

INLINE_BYTES = 4096 - _RECORD.size
"""The kernel takes this much whole or not at all (PIPE_BUF)."""

READ_BYTES = 64 * 1024
"""What a pipe holds."""

HELD_MESSAGES = 4096
"""A message further ahead of its turn than this is garbage."""

HELD_BYTES = 256 * 1024 * 1024
"""More than that ahead of their turn is no delay but an attack on our memory."""


def open_pipe(pid: int, fd: int) -> int:
    """A descriptor that writes into another process's pipe. Raises BusError if it is none, or may not be written to."""
    path = f"/proc/{pid}/fd/{fd}"
    if type(pid) is not int or type(fd) is not int:
        raise BusError(f"{path} is no descriptor of a process")
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            raise BusError(f"{path} is no pipe")
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BusError(f"{path}: {error.strerror}") from None


class LaneWriter:
    """The peer's pipe."""

    def __init__(self, pid: int, fd: int, ring: RingWriter) -> None:
        """Raises BusError if descriptor `fd` of process `pid` is no pipe that we may write to."""
        self._fd = open_pipe(pid, fd)
        self._ring = ring
        self.ring_open = False
        """Whether the peer reads our ring."""
        self.messages = 0

    def send(self, number: int, frame: Any) -> bool:
        """False: there is no room now, or nobody reads it any more; nothing was sent."""
        size = len(frame)
        if size <= INLINE_BYTES:
            record = _RECORD.pack(number, _INLINE, size) + frame
        else:
            position = self._ring.put(frame) if self.ring_open else None
            if position is None:
                return False
            record = _RECORD.pack(number, position, size)
        try:
            os.write(self._fd, record)
        except OSError:
            return False
        self.messages += 1
        return True

    def close(self) -> None:
        os.close(self._fd)


class LaneReader:
    """Our pipe; what comes through it is handed to `receive`, numbered as if it had come by the socket."""

    def __init__(self) -> None:
        """Raises OSError when there is no descriptor left."""
        self._fd, self._other_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Both ends stay open: a peer that is gone is the wire's to notice.
        self._rest = b""
        self._loop: Any = None

    def offer(self) -> int:
        return self._fd

    def start(self, receive: Callable[[List[Any]], None]) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self.read)

    def read(self) -> None:
        """Hand on what is there now."""
        if self._loop is None:
            return
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        for message in self.split(data):
            self._receive(message)
            if self._loop is None:
                return  # closed by what came

    def split(self, data: bytes) -> List[List[Any]]:
        """Whole messages, or their (position, size) in the ring, each with its number as the last frame."""
        if self._rest:
            data = self._rest + data
        messages, begin, available = [], 0, len(data)
        while available - begin >= _RECORD.size:
            number, position, size = _RECORD.unpack_from(data, begin)
            body = begin + _RECORD.size
            if position != _INLINE:
                message: Any = (position, size)
            elif size > INLINE_BYTES:
                message = b""  # no message: the receiver resets the wire
            elif available - body < size:
                break
            else:
                message = data[body:body + size]
                body += size
            messages.append([message, data[begin:begin + NUMBER.size]])
            begin = body
        self._rest = data[begin:]
        return messages

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
        os.close(self._fd)
        os.close(self._other_end)


class InTurn:
    """Messages of both ways, in the order in which they were sent."""

    def __init__(self) -> None:
        self._next = 1
        self._held: Dict[int, List[Any]] = {}
        self._held_bytes = 0

    def take(self, frames: List[Any]) -> Sequence[List[Any]]:
        """Those whose turn has come with this one; a message without a number is not of the two ways.

        Raises CorruptFrame if the peer runs too far ahead of a message that does not come.
        """
        if len(frames[-1]) != NUMBER.size:
            return (frames,)
        number = NUMBER.unpack(frames.pop())[0]
        if number != self._next:
            if not self._next < number <= self._next + HELD_MESSAGES:
                raise CorruptFrame(f"message {number} of the wire came where {self._next} was next")
            self._held_bytes += sum(map(len, frames))
            if self._held_bytes > HELD_BYTES:
                raise CorruptFrame(f"{self._held_bytes} bytes wait for message {self._next} of the wire")
            self._held[number] = frames
            return ()
        self._next += 1
        if not self._held:
            return (frames,)
        ready = [frames]
        while self._next in self._held:
            ready.append(self._held.pop(self._next))
            self._next += 1
        if not self._held:
            self._held_bytes = 0
        return ready


class LanedWire:
    """A wire whose messages take the lane where they can; everything but the sending is the wire's own."""

    def __init__(self, wire: Any, lane: Optional[LaneWriter]) -> None:
        self.name: str = wire.name
        self.role: Optional[str] = wire.role
        self.wire = wire
        self._lane = lane
        self._number = 0

    def send(self, frames: List[Any]) -> bool:
        self._number += 1
        if len(frames) == 1 and self._lane is not None and self._lane.send(self._number, frames[0]):
            return True
        return bool(self.wire.send([*frames, NUMBER.pack(self._number)]))

    def close(self) -> None:
        self.wire.close()
