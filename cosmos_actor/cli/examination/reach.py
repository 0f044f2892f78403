"""The layers below the bus: name, route, TCP, ZMTP greeting. Blocking, each step within its own limit."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from cosmos_actor.bus.errors import CorruptFrame
from cosmos_actor.bus.greeting import GREETING_BYTES, OPENING, Greeting, read_greeting
from cosmos_actor.cli.examination.causes import (
    CLOSED,
    FILTERED,
    NO_CURVE,
    NO_ROUTE,
    NOT_ZMTP,
    SILENT,
    UNRESOLVED,
    Observation,
    bad,
)

RESOLVE_S = 1.5
"""A resolver that has not answered by then does not answer; libc itself would try for half a minute."""
CONNECT_S = 2.0
"""Time for one SYN that was lost to be sent again. More, and a filtered port would not be named within 5 s."""
GREETING_S = 1.2
"""libzmq greets within a round trip."""
UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL)
ELSEWHERE = "198.51.100.1"
"""An address of nobody (RFC 5737): the way to it is the default route."""


def reach(host: str, port: int) -> Iterator[Observation]:
    """A line a layer, until one is bad."""
    found = resolve(host, port)
    if isinstance(found, Observation):
        yield found
        return
    yield Observation("name", "ok", found if found == host else f"{host} is {found}")
    way = route(found, port)
    yield way
    if way.mark == "bad":
        return
    begun = time.monotonic()
    connected = connect(found, port)
    if isinstance(connected, Observation):
        yield connected
        return
    with connected:
        yield Observation("port", "ok", f"open, TCP answers in {1e3 * (time.monotonic() - begun):.2f} ms")
        yield greet(connected)


def resolve(host: str, port: int) -> str | Observation:
    """The IPv4 address that libzmq would dial. The look-up runs in a thread: libc has no deadline for it."""
    found: list[Any] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            found.append(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(RESOLVE_S)
    if not found:
        return bad("name", UNRESOLVED, f"the resolver said nothing about {host} for {RESOLVE_S:g} s")
    if isinstance(found[0], str):
        return found[0]
    return bad("name", UNRESOLVED, f"{host}: {getattr(found[0], 'strerror', None) or found[0]}")


def route(host: str, port: int) -> Observation:
    """The address and interface that the kernel would send from. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            source = str(probe.getsockname()[0])
    except OSError as error:
        return bad("route", NO_ROUTE, f"to {host}: {error.strerror}")
    return Observation("route", "ok", f"{host} is reached from {source} over {interface_of(source)}")


def interface_of(address: str) -> str:
    """The interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in addresses):
            return str(name)
    return "lo" if address.startswith("127.") else "an unknown interface"


def connect(host: str, port: int) -> socket.socket | Observation:
    try:
        return socket.create_connection((host, port), CONNECT_S)
    except TimeoutError:
        return bad("port", FILTERED, f"{host}:{port} answered nothing for {CONNECT_S:g} s")
    except ConnectionRefusedError:
        return bad("port", CLOSED, f"{host} refuses port {port}")
    except OSError as error:
        cause = NO_ROUTE if error.errno in UNREACHABLE else FILTERED
        return bad("port", cause, f"to {host}:{port}: {error.strerror or error}")


def greet(connection: socket.socket) -> Observation:
    """What the listener says about itself."""
    until = time.monotonic() + GREETING_S
    data = b""
    try:
        connection.sendall(OPENING)
        while True:
            greeting = read_greeting(data)
            if greeting is not None:
                return judge_greeting(greeting)
            connection.settimeout(max(0.001, until - time.monotonic()))
            more = connection.recv(GREETING_BYTES)
            if not more:
                return bad("greeting", NOT_ZMTP, f"it closed after {len(data)} of {GREETING_BYTES} bytes")
            data += more
    except CorruptFrame as error:
        return bad("greeting", NOT_ZMTP, str(error))
    except TimeoutError:
        return bad("greeting", SILENT, f"{len(data)} of {GREETING_BYTES} bytes of a greeting within {GREETING_S:g} s")
    except OSError as error:
        return bad("greeting", NOT_ZMTP, f"it broke the connection: {error.strerror}")


def judge_greeting(greeting: Greeting) -> Observation:
    version = "{}.{}".format(*greeting.version)
    if greeting.mechanism == "CURVE":
        return Observation("greeting", "ok", f"ZMTP {version}, CURVE")
    return bad("greeting", NO_CURVE, f"it speaks ZMTP {version} with {greeting.mechanism or 'no security at all'}")
