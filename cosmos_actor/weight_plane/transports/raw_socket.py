"""Sockets of raw streams: every option by name, and no wait without an end."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from cosmos_actor.bus.errors import CorruptFrame
from cosmos_actor.weight_plane.transports.choice import RAW

DEVICE = "?device="
KEEPALIVE_IDLE_S, KEEPALIVE_EACH_S, KEEPALIVE_PROBES = 10, 5, 3
"""A host that vanished is noticed after 25 s even where nobody sends."""


class Silent(OSError):
    """Nothing came, or nothing could be sent, for as long as the socket's patience."""


def listen(host: str) -> socket.socket:
    """A listening socket at any free port of `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=128)


def address_of(host: str, port: int, device: str = "") -> str:
    """`raw://HOST:PORT`; with the GPU that the publisher gives from, where it does: `raw://HOST:PORT?device=UUID`."""
    return (f"{RAW}[{host}]:{port}" if ":" in host else f"{RAW}{host}:{port}") + (f"{DEVICE}{device}" if device else "")


def host_and_port(address: str) -> tuple[str, int]:
    """Of a `raw://` address. Raises CorruptFrame for anything else: it stood in a reference."""
    host, _, port = address.removeprefix(RAW).partition(DEVICE)[0].rpartition(":")
    if not address.startswith(RAW) or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise CorruptFrame(f"{address!r} is no raw://HOST:PORT", channel="weights")
    return host.strip("[]"), int(port)


def device_of(address: str) -> str:
    """The GPU that an address names, or nothing."""
    return address.partition(DEVICE)[2]


def set_up(made: socket.socket, patience_s: float) -> None:
    """Blocking, so that the kernel fills a whole piece in one call; `patience_s` bounds each wait in it."""
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EACH_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    be_patient(made, patience_s)


def be_patient(made: socket.socket, patience_s: float) -> None:
    """From now on a receive or a send that gets on with nothing for so long raises Silent."""
    interval = struct.pack("ll", int(patience_s), int(patience_s % 1 * 1e6))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)


def receive(made: socket.socket, nbytes: int) -> bytes:
    """Exactly `nbytes`; nothing when the other end closed before the first. Raises OSError."""
    buffer = bytearray(nbytes)
    return bytes(buffer) if receive_into(made, memoryview(buffer)) else b""


def receive_into(made: socket.socket, view: memoryview) -> bool:
    """Fill `view`; False when the other end closed before the first byte. Raises ConnectionError when it did within."""
    got = 0
    while got < len(view):
        try:
            count = made.recv_into(view[got:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise Silent(f"{got} of {len(view)} bytes came, then nothing") from None
        if not count:
            if got:
                raise ConnectionError(f"the connection ended after {got} of {len(view)} bytes")
            return False
        got += count
    return True


def send(made: socket.socket, head: bytes, payload: Any = b"") -> None:
    """Both, whole. Raises OSError."""
    try:
        made.sendall(head, socket.MSG_MORE if len(payload) else 0)
        made.sendall(payload)
    except BlockingIOError:
        raise Silent("the other end takes nothing") from None


def shut(made: socket.socket) -> None:
    """End every wait on it, in whatever thread."""
    try:
        made.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # It was over.


def take_leave(made: socket.socket, within_s: float) -> None:
    """Say nothing more, and take what comes until the other end closes too. A socket that is closed with something
    unread is reset, and what was said last may be lost on the way or in the other end's buffer."""
    until = time.monotonic() + within_s
    try:
        made.shutdown(socket.SHUT_WR)
        while (left_s := until - time.monotonic()) > 0:
            made.settimeout(left_s)
            if not made.recv(1 << 16):
                return
    except OSError:
        pass  # It was over, or the time is.
