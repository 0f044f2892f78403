"""The bytes on the wire. Pure.

    frame 0   check    4 bytes, little endian: crc32 over everything after it, then over the other frames
              length   4 bytes, little endian: of the msgpack
              msgpack  [protocol, kind, payload, sizes]
              arrays   each at a multiple of 16 bytes, in the order of ``sizes``
    frame 1.. arrays too large to be copied into frame 0; ``sizes`` has -1 in their places

The payload of DATA is a list of items ``[op, channel, number, arrays, body]``: a batch shares one check and one send.
Check, length, ``[protocol, kind, payload, ..]`` and REFUSED never change, so that another protocol is refused politely.
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

ALIGNMENT_BYTES = 16
"""Arrays start there, so that every dtype's loads are aligned."""

OWN_FRAME_BYTES = 128 * 1024
"""A larger array travels as a frame of its own: copying it would cost more than the frame does."""

_HEAD_BYTES = 8
_PADS = [bytes(count) for count in range(ALIGNMENT_BYTES)]
_DATA_HEAD = bytes([0x94, PROTOCOL, DATA, 0xDD])
_NO_SIZES = b"\x90"
_ITEM = Struct(">BBBBQBH")


def item_head(op: int, channel: int, number: int, frames: int) -> bytes:
    """msgpack of the first four members of an item; the body's msgpack follows."""
    return _ITEM.pack(0x95, op, channel, 0xCF, number, 0xCD, frames)


def item(op: int, channel: int, number: int, body: Any = None) -> bytes:
    """A whole item without arrays."""
    return item_head(op, channel, number, 0) + msgpack.packb(body, use_bin_type=True)  # type: ignore[no-any-return]


def seal_items(items: Sequence[bytes], buffers: Sequence[Any]) -> List[Any]:
    """Frames of one DATA message out of packed items and their arrays' bytes, in the same order."""
    sizes = _NO_SIZES
    if buffers:
        sizes = msgpack.packb([len(buffer) if len(buffer) <= OWN_FRAME_BYTES else -1 for buffer in buffers])
    return _seal([_DATA_HEAD, len(items).to_bytes(4, "big"), *items, sizes], buffers)


def seal_control(kind: int, payload: Any) -> List[Any]:
    """Frames of one message of another kind."""
    return _seal([msgpack.packb([PROTOCOL, kind, payload, []], use_bin_type=True)], ())


def _seal(body: List[bytes], buffers: Sequence[Any]) -> List[Any]:
    length = sum(map(len, body))
    parts = [b"\0\0\0\0", length.to_bytes(4, "little"), *body]
    position = _HEAD_BYTES + length
    apart = []
    for buffer in buffers:
        if len(buffer) > OWN_FRAME_BYTES:
            apart.append(buffer)
            continue
        pad = -position % ALIGNMENT_BYTES
        parts.append(_PADS[pad])
        parts.append(buffer)
        position += pad + len(buffer)
    frame = bytearray().join(parts)
    check = crc32(memoryview(frame)[4:])
    for buffer in apart:
        check = crc32(buffer, check)
    frame[:4] = check.to_bytes(4, "little")
    return [frame, *apart]


def unseal(frames: Sequence[Any]) -> Tuple[int, int, Any, List[Any]]:
    """(protocol, kind, payload, arrays' bytes) of received frames. Raises CorruptFrame for bytes nobody sealed."""
    frame = memoryview(frames[0]) if frames else memoryview(b"")
    if len(frame) <= _HEAD_BYTES:
        raise CorruptFrame("a message without a head")
    check = crc32(frame[4:])
    for other in frames[1:]:
        check = crc32(other, check)
    if check != int.from_bytes(frame[:4], "little"):
        raise CorruptFrame("the check sum of a message is wrong")
    ends = _HEAD_BYTES + int.from_bytes(frame[4:_HEAD_BYTES], "little")
    protocol, kind, payload, sizes = _parse(frame[_HEAD_BYTES:ends])
    return protocol, kind, payload, _arrays(sizes, frame, ends, frames[1:]) if sizes else []


def _arrays(sizes: Any, frame: Any, position: int, apart: Sequence[Any]) -> List[Any]:
    arrays, taken = [], 0
    try:
        for size in sizes:
            if size < 0:
                arrays.append(apart[taken])
                taken += 1
                continue
            position += -position % ALIGNMENT_BYTES
            arrays.append(frame[position:position + size])
            position += size
    except (TypeError, IndexError) as error:
        raise CorruptFrame(f"arrays are missing: {error}") from None
    if position != len(frame) or taken != len(apart):
        raise CorruptFrame("the sizes of a message's arrays do not add up")
    return arrays


def _parse(body: Any) -> Tuple[int, int, Any, Any]:
    try:
        protocol, kind, payload, sizes = unpack(body)
    except (ValueError, TypeError) as error:
        raise CorruptFrame(f"a message that is no envelope: {error}") from None
    if type(protocol) is not int or type(kind) is not int or type(sizes) is not list:
        raise CorruptFrame("a message that is no envelope")
    return protocol, kind, payload, sizes
