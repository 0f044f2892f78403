"""One asker's connection to one bulk server. Used by the asker's thread only."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Iterator, List, Optional

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..keys import KeyRing
from ..socket import make_bulk_dealer, make_monitor
from .server import LONGEST_CHUNK_BYTES

MAX_REPLY_BYTES = LONGEST_CHUNK_BYTES + 4096
REDIAL_S = 0.2
# A pause between two attempts, so that a restarting owner is not dialled in a busy loop.
DIALLING = "dialling"
# Why a connection is down that was never up and never refused.
RESEND_S = 0.01
# The handshake is over a moment before the connection takes messages.
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
)
_OTHER_KEY = "it does not hold the key of its role, or one side has `bulk.encrypt` off"
_SUSPICIOUS = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
# One flipped bit in a handshake, or an owner that dies within it, looks like a wrong key: that is asked twice.


class Connection:
    """Dials until it is closed; says since when it is down and why.

        dialling --handshake--> up --lost--> dialling ...        `refusal` is set: dialling again is no use
    """

    def __init__(
        self, context: Any, address: str, keys: Optional[KeyRing], server_key: Optional[str], now: float
    ) -> None:
        self.address = address
        self.up = False
        self.down_since = now
        self.reason = DIALLING
        self.refusal: Optional[str] = None
        self.breaks = 0
        self._context, self._keys, self._server_key = context, keys, server_key
        self._suspicions = 0
        self._unsent: Deque[List[Any]] = deque()
        self._socket: Any = None
        self._dial_at = now

    def sockets(self) -> List[Any]:
        """To poll for input."""
        return [] if self._socket is None else [self._socket, self._monitor]

    def next_event(self, otherwise: float) -> float:
        """When `turn` has something to do even if no socket is readable."""
        return min(self._dial_at, otherwise) if self._socket is None else otherwise

    def send(self, frames: List[Any]) -> None:
        """Goes out with `flush` while the connection is up; forgotten when it breaks."""
        self._unsent.append(frames)

    def flush(self, now: float, otherwise: float) -> float:
        """Send what can be sent without waiting; when to come back for the rest."""
        while self.up and self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()
        return min(now + RESEND_S, otherwise) if self._unsent else otherwise

    def turn(self, now: float) -> Iterator[List[Any]]:
        """Dial and receive what is possible without waiting; yields the messages that came."""
        if self._socket is None and now >= self._dial_at and self.refusal is None:
            self._dial()
        while self._socket is not None:
            frames = self._receive()
            if frames is None:
                break
            yield [frame.buffer for frame in frames]
        self._watch(now)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
            self._socket = None

    def _dial(self) -> None:
        self._socket = make_bulk_dealer(self._context, self._keys, self._server_key, MAX_REPLY_BYTES)
        self._monitor = make_monitor(self._socket, _EVENTS)
        try:
            if not self.address.startswith("tcp://"):
                raise zmq.ZMQError(msg="only tcp://HOST:PORT is dialled")
            self._socket.connect(self.address)
        except (zmq.ZMQError, ValueError) as error:
            # It stood in a reference: whoever wrote that is told, and the streams of others go on.
            self.refusal = f"no address of a bulk server: {error}"
            self.close()

    def _receive(self) -> Optional[List[Any]]:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)  # type: ignore[no-any-return]
        except zmq.Again:
            return None

    def _send(self, frames: List[Any]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _watch(self, now: float) -> None:
        while self._socket is not None:
            try:
                found = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._follow(found["event"], now)

    def _follow(self, event: int, now: float) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.up, self.reason, self._suspicions = True, "up", 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = "our key is not on its list"
        elif event in _SUSPICIOUS:
            self._suspicions += 1
            self.refusal = _OTHER_KEY if self._suspicions > 1 else None
        else:
            self._break("connection lost" if event == zmq.EVENT_DISCONNECTED else "nobody listens there", now)

    def _break(self, reason: str, now: float) -> None:
        self.close()
        self.down_since = now if self.up else self.down_since
        self.up, self.reason = False, reason
        self.breaks += 1
        self._unsent.clear()
        self._dial_at = now + REDIAL_S
