"""What the two ends of a stream say to each other. Pure: frames in and out, each side beside the other.

    asker -> owner    [ask]                 one chunk of one array, proved with the token of its reference
    owner -> asker    [chunk, payload]      digest over place and payload, keyed with the same token
                      [no]                  the array ended, or the asker had no right to it

The token came to the asker inside the reference, over the authenticated bus, and is never sent here. So the digests
hold against damage and against an attacker on the network alike, with CURVE below them or without.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from typing import Any, List, Sequence, Tuple

from ..errors import CorruptFrame
from ..schema import pack, unpack

VERSION = 1
MAX_ASK_BYTES = 4096
# The owner's socket closes the connection on a larger message: an ask is a hundred bytes.
_PLACE = struct.Struct("<16s8sQQQ")


@dataclass(frozen=True)
class Ask:
    arena: bytes
    """16 bytes: which life of which owner."""
    stream: bytes
    """8 bytes, chosen by the asker: which of its fetches."""
    generation: int
    first: int
    """First byte of the chunk in the array."""
    length: int
    """Bytes."""


@dataclass(frozen=True)
class Chunk:
    ask: Ask
    digest: bytes
    payload: Any


@dataclass(frozen=True)
class No:
    stream: bytes
    reason: str


def pack_ask(ask: Ask, token: bytes) -> List[Any]:
    return [pack([VERSION, *_fields(ask), digest(ask, token, b"ask")])]


def unpack_ask(frames: Sequence[Any]) -> Tuple[Ask, bytes]:
    """(the ask, its proof: `digest(ask, token, b"ask")` if the asker has the token). Raises CorruptFrame."""
    values = _unpack(frames, frame_count=1, value_count=7)
    return _ask(values[1:6]), _bytes(values[6], 32)


def pack_chunk(ask: Ask, payload: Any, token: bytes) -> List[Any]:
    return [pack([VERSION, *_fields(ask), digest(ask, token, payload)]), payload]


def pack_no(ask: Ask, reason: str) -> List[Any]:
    return [pack([VERSION, ask.stream, reason])]


def unpack_reply(frames: Sequence[Any]) -> Any:
    """A Chunk or a No. Raises CorruptFrame."""
    if len(frames) == 1:
        values = _unpack(frames, frame_count=1, value_count=3)
        if type(values[2]) is not str:
            raise CorruptFrame("a bulk message says no without a reason", channel="bulk")
        return No(_bytes(values[1], 8), values[2])
    values = _unpack(frames, frame_count=2, value_count=7)
    return Chunk(_ask(values[1:6]), _bytes(values[6], 32), frames[1])


def digest(ask: Ask, token: bytes, payload: Any) -> bytes:
    """HMAC-SHA-256 of place and payload: a chunk of another array, another place or another fetch has another one."""
    mac = hmac.new(token, _PLACE.pack(*_fields(ask)), "sha256")
    mac.update(payload)
    return mac.digest()


def same(one: bytes, other: bytes) -> bool:
    """In a time that does not tell where they differ."""
    return hmac.compare_digest(one, other)


def _fields(ask: Ask) -> Tuple[bytes, bytes, int, int, int]:
    return ask.arena, ask.stream, ask.generation, ask.first, ask.length


def _ask(values: Sequence[Any]) -> Ask:
    numbers = [value if type(value) is int and 0 <= value < 1 << 63 else None for value in values[2:]]
    if None in numbers:
        raise CorruptFrame("a place in a bulk message is no number", channel="bulk")
    return Ask(_bytes(values[0], 16), _bytes(values[1], 8), *numbers)  # type: ignore[arg-type]


def _bytes(value: Any, length: int) -> bytes:
    if type(value) is not bytes or len(value) != length:
        raise CorruptFrame(f"{length} bytes are missing in a bulk message", channel="bulk")
    return value


def _unpack(frames: Sequence[Any], *, frame_count: int, value_count: int) -> Any:
    try:
        values = unpack(frames[0]) if len(frames) == frame_count else None
    except ValueError as error:
        raise CorruptFrame(f"a bulk message is {error}", channel="bulk") from None
    if type(values) is not list or len(values) != value_count:
        raise CorruptFrame("a bulk message has another form", channel="bulk")
    if type(values[0]) is not int:
        raise CorruptFrame("a bulk message without a protocol", channel="bulk")
    if values[0] != VERSION:
        raise CorruptFrame(f"bulk protocol {values[0]}, ours is {VERSION}", channel="bulk")
    return values
