"""What an attacker or a broken machine makes of valid input: of its bytes, and of the values that the bytes stand for.

Everything takes its choices from one `random.Random`, which is a seed's in the long run and hypothesis's own (so that
it can shrink them) in the default suite.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

from cosmos_actor.bus.schema import pack

MOST_CHANGES = 3
DEEP = "\0deep\0"
"""Stands for a list in a list in a list ..: msgpack's own packer refuses to write what its parser must stand."""

BOMBS = tuple(bytes.fromhex(text) for text in (
    "ddffffffff", "dd7fffffff", "dcffff", "dfffffffff", "deffff",  # arrays and maps of four billion
    "c6ffffffff", "dbffffffff", "c9ffffffff05", "c7ff05", "d405", "d6ff", "d7ff", "c1",  # bytes, texts, extensions
    "cfffffffffffffffff", "d38000000000000000", "cb7ff8000000000000", "cb7ff0000000000000",  # numbers
))
SIZES = tuple(struct.pack(kind, number) for kind in ("<I", ">I", "<Q", ">Q")
              for number in (0, 1, 0x7FFFFFFF, 0xFFFFFFFF))
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 255, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -2**63, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "x", "x" * 500, "../../../proc/self/fd/0", "\x00", b"", b"\0" * 8, b"\xff" * 16,
    b"x" * 32, [], {}, [[]], [None], [0], [-1], [2**62], [0, 2**62], [2**33, 2**33], [1] * 40, [2**63] * 300,
    [1, "2", b"3"], {"a": 1}, {"a": {"a": []}}, DEEP, [DEEP], {"a": DEEP},
)


def changed_bytes(data: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    """A few changes: flips, cuts, splices with other captured input, claims of huge sizes."""
    for _ in range(choose.randint(1, MOST_CHANGES)):
        data = choose.choice(_BYTE_CHANGES)(data, others, choose)
    return data


def changed_value(value: Any, choose: random.Random) -> Any:
    """A few changes at any depth: another type or size in a value's place, fewer or more members, deeper nesting."""
    for _ in range(choose.randint(1, MOST_CHANGES)):
        value = _change_somewhere(value, choose)
    return value


def packed(value: Any) -> bytes:
    """msgpack of a changed value."""
    return pack(value).replace(pack(DEEP), b"\x91" * 900 + b"\xc0")


# -- bytes ------------------------------------------------------------------------------------------------------------


def _position(data: bytes, choose: random.Random) -> int:
    return choose.randint(0, len(data))


def _flip(data: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    if not data:
        return data
    at = choose.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << choose.randrange(8)]) + data[at + 1:]


def _overwrite(data: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    at, new = _position(data, choose), choose.choice(BOMBS + SIZES)
    return data[:at] + new + data[at + len(new):]


def _insert(data: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    at = _position(data, choose)
    return data[:at] + choose.choice(BOMBS + SIZES) + data[at:]


def _cut(data: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    first = _position(data, choose)
    return data[:first] + data[first + choose.randint(1, 64):]


def _truncate(data: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    return data[:_position(data, choose)]


def _repeat(data: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    first = _position(data, choose)
    piece = data[first:first + choose.randint(1, 64)]
    return data[:first] + piece * choose.randint(2, 20) + data[first:]


def _splice(data: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    other = choose.choice(others)
    return data[:_position(data, choose)] + other[_position(other, choose):]


def _nest(data: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    """Lists in lists, each of which claims as many members as fit: what is reserved for them adds up."""
    at, head = _position(data, choose), choose.choice((b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x10\x00", b"\xdc\x08\x00"))
    return data[:at] + head * choose.choice((10, 400, 1500)) + data[at:]


def _long_nest(data: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    """The same at the size of the largest frame, where the claims may be large."""
    claim = choose.choice((2**18, 2**19))
    return data[:_position(data, choose)] + (b"\xdd" + claim.to_bytes(4, "big")) * 900 + bytes(claim)


_BYTE_CHANGES: tuple[Callable[[bytes, Sequence[bytes], random.Random], bytes], ...] = (
    *[_flip] * 4, *[_overwrite] * 4, *[_insert] * 4, *[_cut] * 4, *[_truncate] * 2, *[_repeat] * 4, *[_splice] * 4,
    *[_nest] * 3, _long_nest,
)


# -- values -----------------------------------------------------------------------------------------------------------


def _change_somewhere(value: Any, choose: random.Random) -> Any:
    """Goes down to a random place and changes what is there."""
    if isinstance(value, (list, tuple)) and value and choose.random() < 0.85:
        at = choose.randrange(len(value))
        return [*value[:at], _change_somewhere(value[at], choose), *value[at + 1:]]
    if isinstance(value, dict) and value and choose.random() < 0.85:
        key = choose.choice(sorted(value))
        return {**value, key: _change_somewhere(value[key], choose)}
    return _change_here(value, choose)


def _change_here(value: Any, choose: random.Random) -> Any:
    how = choose.randrange(6)
    if how == 0 and isinstance(value, (list, tuple)):
        return [*value, *value][:choose.randint(0, 2 * len(value))]
    if how == 1:
        return [value] * choose.randint(0, 3)
    if how == 2 and type(value) is int:
        return min(max(value + choose.choice((-1, 1, 4096, -4096, 2**32)), -2**63), 2**64 - 1)
    if how == 3 and isinstance(value, (str, bytes)):
        return value[:choose.randint(0, len(value))] * choose.randint(0, 3)
    return choose.choice(VALUES)
