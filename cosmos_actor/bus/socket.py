"""The only file that makes ZeroMQ contexts and sockets; every option is set here, by name.

libzmq's defaults are wrong for a cluster: they queue for peers that are not there, linger for ever, drop at 1000
messages and never notice a dead host.
"""

from __future__ import annotations

import errno
import fcntl
import resource
import socket as sockets
import uuid
from typing import IO, Any, Optional, Tuple

import zmq

from .errors import AddressInUse, BusError, DescriptorLimit
from .keys import KeyRing

ZAP_DOMAIN = b"cosmos-actor"
"""With a domain set, libzmq asks the ZAP handler about every client; without one, any key is accepted."""

RECEIVE_QUEUE_MESSAGES = 8192
"""A peer that floods us waits in its own TCP buffers beyond this. Senders are bounded by credit."""

HEARTBEAT_INTERVAL_MS = 1000
HEARTBEAT_TIMEOUT_MS = 4000
"""A pulled cable ends the connection in seconds instead of after TCP's hours."""

HANDSHAKE_MS = 3000
"""Who accepts TCP and says nothing is given up in time to tell the user within 5 s."""

RESERVED_BACKLOG = 1024
"""Diallers that may wait at a reserved address while nobody serves it."""

BULK_SEND_QUEUE_CHUNKS = 64
"""An asker that takes nothing holds this many chunks of ours at most; it asks again for what found no room."""

BULK_HEARTBEAT_INTERVAL_MS = 5000
BULK_HEARTBEAT_TIMEOUT_MS = 60_000
"""libzmq hears a peer only by whole messages, and a chunk of 16 MiB takes 40 s at 3 Mbit/s."""


def make_context(io_threads: int = 1) -> Any:
    """A context of its own for each bus; it must not be used after a fork."""
    context: Any = zmq.Context(io_threads=io_threads)
    context.set(zmq.MAX_SOCKETS, 65535)
    return context


def check_descriptors(wanted: int) -> int:
    """Raise the soft limit to the hard one; DescriptorLimit if that is still less than `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard > soft:
        goal = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        if goal > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
            soft = goal
    if soft < wanted:
        raise DescriptorLimit(
            f"only {soft} file descriptors allowed, {wanted} wanted: raise `ulimit -n`", setting="bus.min_descriptors"
        )
    return soft


def make_dealer(
    context: Any, keys: Optional[KeyRing], server_key: Optional[str], identity: bytes, max_frame: int
) -> Any:
    """A dialler's socket: one peer, one connection, no queue before it stands, no second attempt by libzmq."""
    socket = _make(context, zmq.DEALER, max_frame)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    if keys is not None and server_key is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    return socket


def make_router(context: Any, keys: Optional[KeyRing], max_frame: int) -> Any:
    """A listener's socket: unknown peers are an error, a second peer under one identity is turned away."""
    socket = _make(context, zmq.ROUTER, max_frame)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    return socket


def make_bulk_router(context: Any, keys: Optional[KeyRing], max_frame: int) -> Any:
    """A bulk server's socket: it answers, in large pieces."""
    return _for_bulk(make_router(context, keys, max_frame))


def make_bulk_dealer(context: Any, keys: Optional[KeyRing], server_key: Optional[str], max_frame: int) -> Any:
    """An asker's socket for one owner of arrays."""
    return _for_bulk(make_dealer(context, keys, server_key, b"bulk:" + uuid.uuid4().hex.encode(), max_frame))


def _for_bulk(socket: Any) -> Any:
    socket.setsockopt(zmq.SNDHWM, BULK_SEND_QUEUE_CHUNKS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, BULK_HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, BULK_HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, BULK_HEARTBEAT_TIMEOUT_MS)
    return socket


def make_zap(context: Any) -> Any:
    """The socket on which libzmq asks whether a client's key is allowed; one per context."""
    socket = _new(context, zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("inproc://zeromq.zap.01")
    return socket


def make_monitor(socket: Any, events: int) -> Any:
    """A socket that tells what becomes of another socket's connections."""
    monitor = socket.get_monitor_socket(events, addr=f"inproc://monitor-{uuid.uuid4().hex}")
    monitor.setsockopt(zmq.LINGER, 0)
    return monitor


def bind(socket: Any, address: str, listener: Optional[int] = None) -> str:
    """Bind and return the address with its real port. AddressInUse, or BusError for an address that cannot be bound.

    `listener`: the descriptor of a socket that listens there already, see `reserve`.
    """
    _check_interface(address)
    if listener is not None:
        socket.setsockopt(zmq.USE_FD, listener)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise _no_listener(address, error) from None
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[no-any-return]


def reserve(address: str) -> Tuple[sockets.socket, str]:
    """A socket that listens at ``tcp://HOST:PORT``, for `bind` in another process, and the address with its real port.

    While it is open nobody else gets the port, and who dials waits for whoever serves it next. Raises as `bind` does.
    """
    _check_interface(address)
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        family, kind, protocol, _, where = sockets.getaddrinfo(
            host.strip("[]"), int(port), type=sockets.SOCK_STREAM, flags=sockets.AI_PASSIVE)[0]
        listener = sockets.socket(family, kind, protocol)
        try:
            listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(where)
            listener.listen(RESERVED_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _no_listener(address, error) from None
    name, number = listener.getsockname()[:2]
    return listener, f"tcp://[{name}]:{number}" if family == sockets.AF_INET6 else f"tcp://{name}:{number}"


def _check_interface(address: str) -> None:
    host = address.split("://", 1)[-1].rsplit(":", 1)[0]
    if address.startswith("tcp://") and host in ("*", "0.0.0.0", "[::]"):
        raise BusError(f"{address}: name the interface's address, others must be able to dial it", setting="listen")


def _no_listener(address: str, error: Any) -> BusError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(f"{address} is in use: choose another port, or 0 for any", setting="listen")
    return BusError(f"can not listen at {address}: {error.strerror}", setting="listen")


def own_ipc_path(address: str) -> Optional[IO[str]]:
    """The lock of an ipc:// path, held while it is open; AddressInUse if somebody else has it.

    libzmq itself would take the path away from whoever listens there, silently.
    """
    if not address.startswith("ipc://"):
        return None
    lock = open(address[len("ipc://"):] + ".lock", "w", encoding="ascii")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise AddressInUse(f"{address} is in use: choose another path", setting="listen") from None
    return lock


def _make(context: Any, kind: int, max_frame: int) -> Any:
    socket = _new(context, kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    return socket


def _new(context: Any, kind: int) -> Any:
    try:
        return context.socket(kind)
    except zmq.ZMQError as error:
        if error.errno == 24:  # EMFILE
            raise DescriptorLimit("out of file descriptors: raise `ulimit -n`", setting="bus.min_descriptors") from None
        raise
