"""The bytes on the wire. Pure.

    frame 0   crc32 (4 bytes, little endian) over everything after it, then over the other frames
              msgpack [protocol, kind, payload]
    frame 1.. raw bytes of the arrays, in order

The payload of DATA is a list of items ``[op, channel, number, frames, body]``: a batch shares one check and one send.
The layout of ``[protocol, kind, payload]`` and of REFUSED never changes, so that another protocol is refused politely.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, List, Sequence, Tuple
from zlib import crc32

import msgpack  # type: ignore[import-untyped]

from .errors import CorruptFrame
from .schema import unpack

PROTOCOL = 1

HELLO, WELCOME, REFUSED, GOODBYE, RESET, DATA = range(6)
"""Kinds. RESET: the receiver found the wire's bytes wrong; introduce yourself again on a new one."""

MESSAGE, RESULT, FAILED, ACK, FLOOR, NACK, STATE_ACK, PULSE = range(8)
"""Items.
MESSAGE    number; body [schema, version, fingerprint, plain, key or topic]
RESULT     the handler of `number` returned this message; body as above
FAILED     the handler of `number` raised; body [kind, text]
ACK        `number`..body (inclusive) are done without a result
FLOOR      everything below `number` is settled at the sender: forget its results
NACK       `number` is the next one wanted: send from there again
STATE_ACK  revision `number` of topic `body` was handled
PULSE      heartbeat: `number` is progress; body [busy for s, label, [next number of work, call, event]]
"""

WORK, CALL, EVENT, STATE = range(4)
CHANNELS = ("work", "call", "event", "state")

_CRC_BYTES = 4
_DATA_HEAD = bytes([0x93, PROTOCOL, DATA, 0xDD])
_ITEM = Struct(">BBBBQBH")


def item_head(op: int, channel: int, number: int, frames: int) -> bytes:
    """msgpack of the first four members of an item; the body's msgpack follows."""
    return _ITEM.pack(0x95, op, channel, 0xCF, number, 0xCD, frames)


def item(op: int, channel: int, number: int, body: Any = None) -> bytes:
    """A whole item without arrays."""
    return item_head(op, channel, number, 0) + msgpack.packb(body, use_bin_type=True)  # type: ignore[no-any-return]


def seal(body: bytes, buffers: Sequence[Any] = ()) -> List[Any]:
    """Frames that ``unseal`` takes; one flipped bit anywhere in them is noticed."""
    check = crc32(body)
    for buffer in buffers:
        check = crc32(buffer, check)
    return [check.to_bytes(_CRC_BYTES, "little") + body, *buffers]


def seal_items(items: Sequence[bytes], buffers: Sequence[Any]) -> List[Any]:
    """One DATA message out of packed items and their arrays' buffers in the same order."""
    return seal(b"".join((_DATA_HEAD, len(items).to_bytes(4, "big"), *items)), buffers)


def seal_control(kind: int, payload: Any) -> List[Any]:
    """One message of another kind."""
    return seal(msgpack.packb([PROTOCOL, kind, payload], use_bin_type=True))


def unseal(frames: Sequence[Any]) -> Tuple[int, int, Any]:
    """(protocol, kind, payload) of received frames. Raises CorruptFrame for bytes nobody sealed."""
    head = memoryview(frames[0]) if frames else memoryview(b"")
    if len(head) <= _CRC_BYTES:
        raise CorruptFrame("a message without a head")
    check = crc32(head[_CRC_BYTES:])
    for frame in frames[1:]:
        check = crc32(frame, check)
    if check != int.from_bytes(head[:_CRC_BYTES], "little"):
        raise CorruptFrame("the check sum of a message is wrong")
    return _parse(head[_CRC_BYTES:])


def _parse(body: Any) -> Tuple[int, int, Any]:
    try:
        protocol, kind, payload = unpack(body)
    except (ValueError, TypeError) as error:
        raise CorruptFrame(f"a message that is no envelope: {error}") from None
    if type(protocol) is not int or type(kind) is not int:
        raise CorruptFrame("a message that is no envelope")
    return protocol, kind, payload
