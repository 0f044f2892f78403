"""The first 64 bytes of a ZeroMQ connection (ZMTP 3, RFC 23). Pure: bytes in, what they say out.

    signature  10 bytes  ff, eight of anything, 7f
    version     2 bytes  major, minor
    mechanism  20 bytes  NULL, PLAIN or CURVE, filled with zeros
    as-server   1 byte   libzmq leaves it 0 on both sides
    filler     31 bytes
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

from .errors import CorruptFrame

GREETING_BYTES = 64
_SIGNATURE_BYTES = 10
_SECURE_SINCE = 3
"""Versions before it know no mechanisms."""

OTHERS = (
    (b"HTTP/", "HTTP"), (b"SSH-", "SSH"), (b"\x15\x03", "TLS"), (b"\x16\x03", "TLS"), (b"220 ", "SMTP or FTP"),
    (b"-ERR", "Redis"),
)
"""How the answers of protocols begin that stand at a mistaken port most often."""


class Greeting(NamedTuple):
    """What a listener says about itself before anything is secret."""

    version: Tuple[int, int]
    mechanism: str
    """Empty for a version that has none."""


OPENING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01"
"""What a dialler says to see a listener's whole greeting. One that hears of another mechanism before it is through
with its own hangs up instead."""


def read_greeting(data: bytes) -> Optional[Greeting]:
    """The greeting that these bytes begin with; None: it is not whole yet. Raises CorruptFrame: it is none."""
    if not data:
        return None
    if data[0] != 0xFF or (len(data) >= _SIGNATURE_BYTES and data[_SIGNATURE_BYTES - 1] != 0x7F):
        raise CorruptFrame(f"it speaks no ZMTP: {_shown(data)}")
    if len(data) <= _SIGNATURE_BYTES:
        return None
    major = data[_SIGNATURE_BYTES]
    if major < _SECURE_SINCE:
        return Greeting((2 if major == 1 else major, 0), "")  # ZMTP 2.0 calls itself revision 1
    if len(data) < GREETING_BYTES:
        return None
    name = data[12:32].rstrip(b"\0")
    if not name or not name.isalnum() or not name.isascii():
        raise CorruptFrame(f"its ZMTP greeting names no mechanism: {name!r}")
    return Greeting((major, data[11]), name.decode("ascii"))


def _shown(data: bytes) -> str:
    known = next((f"{name}, " for begin, name in OTHERS if data.startswith(begin)), "")
    return f"{known}it begins with {bytes(data[:16])!r}"
