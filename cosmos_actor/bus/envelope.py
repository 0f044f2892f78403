"""The bytes on the wire. Pure.

    frame 0   check    4 bytes, little endian: crc32 over everything up to the arrays
              length   4 bytes, little endian: of the msgpack
              sum      8 bytes, little endian: the arrays' 64-bit words added up, modulo 2 ** 64
              msgpack  [protocol, kind, payload, sizes]
              arrays   each at a multiple of 16 bytes, in the order of ``sizes``, zeros between them
    frame 1.. arrays too large to be copied into frame 0; ``sizes`` has -1 in their places

A sum notices any one flipped bit as crc32 does, at a tenth of its price; on a network CURVE authenticates each frame.

The payload of DATA is a list of items ``[op, channel, number, arrays, body]``: a batch shares one check and one send.
Check, length, ``[protocol, kind, payload, ..]`` and REFUSED never change, so that another protocol is refused politely.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, List, Sequence, Tuple
from zlib import crc32

import msgpack  # type: ignore[import-untyped]
import numpy as np

from .errors import CorruptFrame
from .schema import unpack

PROTOCOL = 1

HELLO, WELCOME, REFUSED, GOODBYE, RESET, DATA = range(6)
"""Kinds. RESET: the receiver found the wire's bytes wrong; introduce yourself again on a new one."""

MESSAGE, RESULT, FAILED, ACK, FLOOR, NACK, STATE_ACK, PULSE, TAKEN = range(9)
"""Items.
MESSAGE    number; body [schema, version, fingerprint, plain, key or topic]
RESULT     the handler of `number` returned this message; body as above
FAILED     the handler of `number` raised; body [kind, text]
ACK        `number`..body (inclusive) are done without a result
FLOOR      everything below `number` is settled at the sender: forget its results
NACK       `number` is the next one wanted: send from there again
STATE_ACK  revision `number` of topic `body` was handled
PULSE      heartbeat: `number` is progress; body [busy for s, label, [next number of work, call, event]]
TAKEN      everything before position `number` of your ring was read; 0 says that it is open here
"""

WORK, CALL, EVENT, STATE = range(4)
CHANNELS = ("work", "call", "event", "state")

ALIGNMENT_BYTES = 16
"""Arrays start there, so that every dtype's loads are aligned."""

OWN_FRAME_BYTES = 128 * 1024
"""A larger array travels as a frame of its own: copying it would cost more than the frame does."""

_HEAD_BYTES = 16
_BLANK_HEAD = bytes(_HEAD_BYTES)
_HEAD = Struct("<IIQ")
_CHECK = Struct("<I")
_PADS = [bytes(count) for count in range(ALIGNMENT_BYTES)]
_WORD = np.dtype("<u8")
_SUM_MASK = (1 << 64) - 1
_DATA_HEAD = bytes([0x94, PROTOCOL, DATA, 0xDD])
_NO_SIZES = b"\x90"
_ITEM = Struct(">BBBBQBH")


def item_head(op: int, channel: int, number: int, frames: int) -> bytes:
    """msgpack of the first four members of an item; the body's msgpack follows."""
    return _ITEM.pack(0x95, op, channel, 0xCF, number, 0xCD, frames)


def item(op: int, channel: int, number: int, body: Any = None) -> bytes:
    """A whole item without arrays."""
    return item_head(op, channel, number, 0) + msgpack.packb(body, use_bin_type=True)  # type: ignore[no-any-return]


def seal_items(items: Sequence[bytes], buffers: Sequence[Any], own_frame_bytes: int = OWN_FRAME_BYTES) -> List[Any]:
    """Frames of one DATA message out of packed items and their arrays' bytes, in the same order.

    Arrays larger than `own_frame_bytes` are not copied: their frames are the given buffers.
    """
    sizes = _NO_SIZES
    if buffers:
        sizes = msgpack.packb([len(buffer) if len(buffer) <= own_frame_bytes else -1 for buffer in buffers])
    return _seal([_DATA_HEAD, len(items).to_bytes(4, "big"), *items, sizes], buffers, own_frame_bytes)


def seal_control(kind: int, payload: Any) -> List[Any]:
    """Frames of one message of another kind."""
    return _seal([msgpack.packb([PROTOCOL, kind, payload, []], use_bin_type=True)], (), 0)


def _seal(body: List[bytes], buffers: Sequence[Any], own_frame_bytes: int) -> List[Any]:
    length = sum(map(len, body))
    start = _HEAD_BYTES + length
    parts: List[Any] = [_BLANK_HEAD, *body]
    apart = []
    if buffers:
        parts.append(_PADS[-start % ALIGNMENT_BYTES])
        start += -start % ALIGNMENT_BYTES
    for buffer in buffers:
        size = len(buffer)
        if size > own_frame_bytes:
            apart.append(buffer)
        else:
            parts.append(buffer)
            parts.append(_PADS[-size % ALIGNMENT_BYTES])
    frame = bytearray().join(parts)
    held = memoryview(frame)
    _HEAD.pack_into(frame, 0, 0, length, _sum(held[start:], apart) if buffers else 0)
    _CHECK.pack_into(frame, 0, crc32(held[4:start]))
    return [frame, *apart]


def _sum(arrays: Any, apart: Sequence[Any]) -> int:
    total = _words(arrays)
    for buffer in apart:
        total += _words(buffer)
    return total & _SUM_MASK


def _words(data: Any) -> int:
    count, rest = divmod(len(data), _WORD.itemsize)
    total = int(np.add.reduce(np.frombuffer(data, _WORD, count))) if count else 0
    return total + int.from_bytes(data[-rest:], "little") if rest else total


def unseal(frames: Sequence[Any]) -> Tuple[int, int, Any, List[Any]]:
    """(protocol, kind, payload, arrays' bytes) of received frames. Raises CorruptFrame for bytes nobody sealed."""
    frame = memoryview(frames[0]) if frames else memoryview(b"")
    if len(frame) < _HEAD_BYTES:
        raise CorruptFrame("a message without a head")
    check, length, total = _HEAD.unpack_from(frame)
    ends = _HEAD_BYTES + length
    start = min(ends + -ends % ALIGNMENT_BYTES, len(frame))
    if check != crc32(frame[4:start]):
        raise CorruptFrame("the check sum of a message is wrong")
    if (len(frame) > start or len(frames) > 1) and total != _sum(frame[start:], frames[1:]):
        raise CorruptFrame("the check sum of a message's arrays is wrong")
    protocol, kind, payload, sizes = _parse(frame[_HEAD_BYTES:ends])
    if not sizes and len(frame) == ends and len(frames) == 1:
        return protocol, kind, payload, []
    return protocol, kind, payload, _arrays(sizes, frame, start, frames[1:])


def _arrays(sizes: Any, frame: Any, position: int, apart: Sequence[Any]) -> List[Any]:
    arrays, taken = [], 0
    try:
        for size in sizes:
            if size < 0:
                arrays.append(apart[taken])
                taken += 1
                continue
            arrays.append(frame[position:position + size])
            position += size + -size % ALIGNMENT_BYTES
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
