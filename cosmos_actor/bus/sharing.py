"""What the two ends of one wire share when they are processes of one host: a ring and a lane in each direction."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence

from .errors import BusError
from .identity import host_id
from .lane import InTurn, LanedWire, LaneReader, LaneWriter
from .ring import RingReader, RingWriter


class Sharing:
    """Both sides offer, then both accept; whatever of the other's can not be opened is done by the socket."""

    def __init__(self, capacity_bytes: int, message_bytes: Optional[int] = None) -> None:
        """0: nothing is shared. `message_bytes`: what one message of the peer may have in its ring."""
        self._message_bytes = message_bytes
        self.writer = RingWriter(capacity_bytes) if capacity_bytes else None
        self.reader: Optional[RingReader] = None
        self._lane_in = LaneReader() if capacity_bytes else None
        self._lane_out: Optional[LaneWriter] = None
        self._turn: Optional[InTurn] = None

    def offer(self) -> Any:
        """For the peer: how to open our ring, then our lane; None without them."""
        if self.writer is None or self._lane_in is None:
            return None
        return [self.writer.offer(), self._lane_in.offer()]

    def accept(self, offer: Any, host: str) -> None:
        """Open the peer's ends. On another host, or with a peer that offers nothing, nothing is kept."""
        if self.writer is None or offer is None or host != host_id():
            self.close()
            return
        self._turn = InTurn()
        try:
            ring, lane = offer
            self.reader = RingReader(ring, self._message_bytes)
            self._lane_out = LaneWriter(ring[0], lane, self.writer)
        except (BusError, TypeError, ValueError):
            pass

    @property
    def has_lane(self) -> bool:
        return self._lane_out is not None

    def carry(self, wire: Any) -> Any:
        """The wire to send through."""
        return wire if self._turn is None else LanedWire(wire, self._lane_out)

    def start(self, receive: Callable[[List[Any]], None]) -> None:
        if self._turn is not None and self._lane_in is not None:
            self._lane_in.start(receive)

    def in_turn(self, frames: List[Any]) -> Sequence[List[Any]]:
        """The messages whose turn has come with this one. Raises CorruptFrame."""
        return (frames,) if self._turn is None else self._turn.take(frames)

    def drain(self) -> None:
        """The wire broke: hand on what had come through the lane before."""
        if self._lane_in is not None:
            self._lane_in.read()

    def ring_taken(self, position: int) -> RingWriter:
        """The peer has our ring open and has read everything before `position`. ValueError for what is not there."""
        if self.writer is None:
            raise ValueError("there is no ring")
        self.writer.free(position)
        if self._lane_out is not None:
            self._lane_out.ring_open = True
        return self.writer

    def statistics(self) -> Dict[str, int]:
        """What did not go by the socket."""
        return {
            "lane_messages": 0 if self._lane_out is None else self._lane_out.messages,
            "ring_arrays": 0 if self.writer is None else self.writer.arrays,
        }

    def close(self) -> None:
        for end in (self.writer, self.reader, self._lane_in, self._lane_out):
            if end is not None:
                end.close()
        self.writer = self.reader = self._lane_in = self._lane_out = None
