"""Wires over ZeroMQ: a DEALER per dialled peer, one ROUTER for all who dial us.

A socket is read until it is empty whenever its descriptor turns readable, and looked at again after each send: libzmq's
descriptor is edge-triggered, and a send can swallow the edge.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from typing import IO, Any, Callable, Dict, List, Optional

import zmq
from zmq.utils.monitor import parse_monitor_message

from .errors import KeyFileError
from .handshake import KEY_NOT_LISTED, NO_CURVE, WRONG_SERVER_KEY
from .identity import Identity
from .keys import KeyRing
from .limits import Limits
from .socket import (
    bind,
    check_descriptors,
    make_context,
    make_dealer,
    make_monitor,
    make_router,
    make_zap,
    own_ipc_path,
)
from .transport import WireOwner
from .zap import Doorkeeper

BIG_FRAME_BYTES = 64 * 1024
"""Above it a frame is sent without a copy; below, the copy is cheaper than the bookkeeping."""

_DIAL_EVENTS = (
    zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
HUNG_UP = "no handshake: the listener hung up, it is no bus or it is ending"
_EAGAIN = 11
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_RCVMORE = int(zmq.RCVMORE)


class Readable:
    """Calls `receive` for each message that the socket has, `budget` times in a row at most.

    The socket is asked before each one: a receive that finds nothing costs twenty times as much.
    """

    def __init__(self, socket: Any, receive: Callable[[], None], budget: int) -> None:
        self.socket = socket
        self._receive = receive
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._again: Optional[asyncio.Handle] = None
        self._descriptor = socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._descriptor, self.drain)
        self._soon()

    def drain(self) -> None:
        self._again = None
        for _ in range(self._budget):
            if self.socket.closed or not self.socket.getsockopt(_EVENTS) & _POLLIN:
                return
            self._receive()
        self._soon()

    def after_send(self) -> None:
        """A send may have taken the descriptor's edge with it."""
        if self._again is None and self.socket.getsockopt(_EVENTS) & _POLLIN:
            self._soon()

    def _soon(self) -> None:
        if self._again is None:
            self._again = self._loop.call_soon(self.drain)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if self._again is not None:
            self._again.cancel()


def _send(socket: Any, frames: List[Any]) -> bool:
    try:
        for frame in frames[:-1]:
            socket.send(frame, _MORE, len(frame) < BIG_FRAME_BYTES)
        socket.send(frames[-1], _LAST, len(frames[-1]) < BIG_FRAME_BYTES)
    except zmq.ZMQError:
        # EAGAIN: the connection is gone. EHOSTUNREACH: the peer is. Neither takes anything.
        return False
    return True


class DialledWire:
    """A DEALER and its monitor, for one connection."""

    def __init__(self, transport: ZmqTransport, address: str, server_key: Optional[str], owner: WireOwner) -> None:
        self.name = f"{address}#{next(transport.counter)}"
        self.role: Optional[str] = None
        self._transport = transport
        self._owner = owner
        self._refusal: Optional[str] = None
        self._lost = HUNG_UP
        routing = f"{transport.identity.role}:{transport.unique}:{self.name.rsplit('#')[-1]}".encode()[:255]
        max_frame = transport.limits.max_frame_bytes
        self._socket = make_dealer(transport.context, transport.keys, server_key, routing, max_frame)
        self._monitor = make_monitor(self._socket, _DIAL_EVENTS)
        self._socket.connect(address)
        budget = transport.limits.drain_messages
        self._reader = Readable(self._socket, self._receive, budget)
        self._watcher = Readable(self._monitor, self._watch, budget)

    def send(self, frames: List[Any]) -> bool:
        if self._socket.closed:
            return False
        sent = _send(self._socket, frames)
        self._reader.after_send()
        return sent

    def _receive(self) -> None:
        frames = [self._socket.recv(_LAST)]
        while self._socket.getsockopt(_RCVMORE):
            frames.append(self._socket.recv(_LAST))
        self._owner.wire_frames(self, frames)

    def _watch(self) -> None:
        event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
        kind = event["event"]
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._lost = "connection lost"
            self._socket.getsockopt(zmq.EVENTS)  # lets libzmq attach the connection before the first send
            self._owner.wire_up(self)
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refusal = f"{KEY_NOT_LISTED}: the listener does not know our key"
        elif kind in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self._refusal = _no_detail(event["value"])
        elif kind == zmq.EVENT_DISCONNECTED:
            self._down(self._refusal or self._lost, self._refusal is not None)
        elif kind == zmq.EVENT_CLOSED:
            self._down("nobody listens there", False)

    def _down(self, reason: str, refused: bool) -> None:
        while not self._socket.closed and self._socket.getsockopt(_EVENTS) & _POLLIN:
            self._receive()  # what came before the end is still good
        if not self._socket.closed:
            self.close()
            self._owner.wire_down(self, reason, refused)

    def close(self) -> None:
        if self._socket.closed:
            return
        self._reader.close()
        self._watcher.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(self._transport.limits.linger_ms)
        self._transport.dialled.pop(self.name, None)


def _no_detail(value: int) -> str:
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return f"{NO_CURVE}: the listener is a ZeroMQ socket without keys"
    if value == _EAGAIN:
        return "no handshake: whatever listens there is not a bus, or is stuck"
    return f"{WRONG_SERVER_KEY}: the listener does not hold the key of the role we want (or is no bus)"


class AcceptedWire:
    """One routing id of the ROUTER."""

    def __init__(self, transport: ZmqTransport, routing: bytes, role: Optional[str]) -> None:
        self.name = routing.decode("ascii", "replace")
        self.role = role
        self.routing = routing
        self._transport = transport

    def send(self, frames: List[Any]) -> bool:
        return self._transport.send_to(self, frames)

    def close(self) -> None:
        self._transport.accepted.pop(self.routing, None)


class ZmqTransport:
    """``tcp://HOST:PORT`` and ``ipc://PATH``, with CURVE; without keys only when told so by name."""

    between_processes = True

    def __init__(self, *, insecure: bool = False, listener: Optional[int] = None) -> None:
        """`listener`: the descriptor of a socket that listens at our address already, see `socket.reserve`."""
        self._insecure = insecure
        self._listener = listener
        self.counter = itertools.count(1)
        self.unique = uuid.uuid4().hex
        self.dialled: Dict[str, DialledWire] = {}
        self.accepted: Dict[bytes, AcceptedWire] = {}
        self._router: Any = None
        self._router_reader: Optional[Readable] = None
        self._door: Optional[Doorkeeper] = None
        self._door_reader: Optional[Readable] = None
        self._owner: Optional[WireOwner] = None
        self._ipc_lock: Optional[IO[str]] = None

    def open(self, identity: Identity, keys: Optional[KeyRing], limits: Limits) -> None:
        if keys is None and not self._insecure:
            raise KeyFileError("ZeroMQ wires need keys: pass a KeyRing", setting="keys")
        check_descriptors(limits.min_descriptors)
        self.identity, self.keys, self.limits = identity, keys, limits
        self.context = make_context()

    def listen(self, address: str, owner: WireOwner) -> str:
        if self.keys is not None:
            self._door = Doorkeeper(make_zap(self.context), self.keys)
            self._door_reader = Readable(self._door.socket, self._door.answer_one, self.limits.drain_messages)
        self._owner = owner
        self._router = make_router(self.context, self.keys, self.limits.max_frame_bytes)
        self._ipc_lock = own_ipc_path(address)
        bound = bind(self._router, address, self._listener)
        self._router_reader = Readable(self._router, self._accept, self.limits.drain_messages)
        return bound

    def dial(self, address: str, role: str, owner: WireOwner) -> DialledWire:
        server_key = None if self.keys is None else self.keys.key_of(role)
        wire = DialledWire(self, address, server_key, owner)
        self.dialled[wire.name] = wire
        return wire

    def send_to(self, wire: AcceptedWire, frames: List[Any]) -> bool:
        if self._router is None or self.accepted.get(wire.routing) is not wire:
            return False
        sent = _send(self._router, [wire.routing, *frames])
        if self._router_reader is not None:
            self._router_reader.after_send()
        if not sent:
            wire.close()
            asyncio.get_running_loop().call_soon(self._tell_down, wire)
        return sent

    def _tell_down(self, wire: AcceptedWire) -> None:
        if self._owner is not None:
            self._owner.wire_down(wire, "connection lost", False)

    def _accept(self) -> None:
        routing = self._router.recv(_LAST)
        wire = self.accepted.get(routing)
        if wire is None:
            wire, first = self._new_wire(routing)
        else:
            first = self._router.recv(_LAST)
        frames = [first]
        while self._router.getsockopt(_RCVMORE):
            frames.append(self._router.recv(_LAST))
        if self._owner is not None:
            self._owner.wire_frames(wire, frames)

    def _new_wire(self, routing: bytes) -> Any:
        first = self._router.recv(zmq.NOBLOCK, copy=False)
        role = None
        if self.keys is not None:
            role = first.get("User-Id")
        wire = AcceptedWire(self, routing, role)
        self.accepted[routing] = wire
        return wire, first.bytes

    def close(self, linger_ms: int) -> None:
        for wire in list(self.dialled.values()):
            wire.close()
        for reader in (self._router_reader, self._door_reader):
            if reader is not None:
                reader.close()
        if self._router is not None:
            self._router.close(linger_ms)
        if self._door is not None:
            self._door.socket.close(0)
        self._router, self._owner = None, None
        self.accepted.clear()
        self.context.term()
        if self._ipc_lock is not None:
            self._ipc_lock.close()

    def statistics(self) -> Dict[str, Any]:
        door = self._door
        return {
            "kind": "zmq",
            "dialled": len(self.dialled),
            "accepted": len(self.accepted),
            "keys_turned_away": door.turned_away if door else 0,
        }
