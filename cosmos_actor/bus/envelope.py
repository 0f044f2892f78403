"""The bytes on the wire. Pure, but for the ring of shared memory that two processes of one host have.

    frame 0   check    4 bytes, little endian: crc32 over everything after it, then over the other frames
              length   4 bytes, little endian: of the msgpack
              msgpack  [protocol, kind, payload, places]
              arrays   each at a multiple of 16 bytes, in the order of ``places``, zeros between them
    frame 1.. arrays too large to be copied into frame 0

A place is an array's size in bytes; -1: it is the next frame; [position, size]: it lies in the sender's ring.
The payload of DATA is a list of items ``[op, channel, number, arrays, body]``: a batch shares one check and one send.
Check, length, ``[protocol, kind, payload, ..]`` and REFUSED never change, so that another protocol is refused politely.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, List, Optional, Sequence, Tuple
from zlib import crc32

import msgpack  # type: ignore[import-untyped]

from .errors import CorruptFrame
from .ring import SHARED_FROM_BYTES, RingReader, RingWriter
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

_HEAD_BYTES = 8
_BLANK_HEAD = bytes(_HEAD_BYTES)
_HEAD = Struct("<II")
_CHECK = Struct("<I")
_PADS = [bytes(count) for count in range(ALIGNMENT_BYTES)]
_DATA_HEAD = bytes([0x94, PROTOCOL, DATA, 0xDD])
_NO_PLACES = b"\x90"
_ITEM = Struct(">BBBBQBH")
_pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack


def item_head(op: int, channel: int, number: int, frames: int) -> bytes:
    """msgpack of the first four members of an item; the body's msgpack follows."""
    return _ITEM.pack(0x95, op, channel, 0xCF, number, 0xCD, frames)


def item(op: int, channel: int, number: int, body: Any = None) -> bytes:
    """A whole item without arrays."""
    return item_head(op, channel, number, 0) + _pack(body)  # type: ignore[no-any-return]


def seal_items(items: Sequence[bytes], buffers: Sequence[Any], ring: Optional[RingWriter] = None) -> List[Any]:
    """Frames of one DATA message out of packed items and their arrays' bytes, in the same order.

    Large arrays go into the ring if there is one and it has room; else into frames that are the given buffers.
    """
    places = _NO_PLACES
    if buffers:
        found = [_place(buffer, ring) for buffer in buffers]
        buffers = [buffer for buffer, place in zip(buffers, found) if type(place) is int]
        places = _pack(found)
    return _seal([_DATA_HEAD, len(items).to_bytes(4, "big"), *items, places], buffers)


def _place(buffer: Any, ring: Optional[RingWriter]) -> Any:
    size = len(buffer)
    if ring is not None and size >= SHARED_FROM_BYTES:
        position = ring.put(buffer)
        if position is not None:
            return (position, size)
    return size if size <= OWN_FRAME_BYTES else -1


def seal_control(kind: int, payload: Any) -> List[Any]:
    """Frames of one message of another kind."""
    return _seal([_pack([PROTOCOL, kind, payload, []])], ())


def _seal(body: List[bytes], buffers: Sequence[Any]) -> List[Any]:
    length = sum(map(len, body))
    parts: List[Any] = [_BLANK_HEAD, *body]
    apart = []
    if buffers:
        parts.append(_PADS[-(_HEAD_BYTES + length) % ALIGNMENT_BYTES])
    for buffer in buffers:
        size = len(buffer)
        if size > OWN_FRAME_BYTES:
            apart.append(buffer)
        else:
            parts.append(buffer)
            parts.append(_PADS[-size % ALIGNMENT_BYTES])
    frame = bytearray().join(parts)
    _HEAD.pack_into(frame, 0, 0, length)
    check = crc32(memoryview(frame)[4:])
    for buffer in apart:
        check = crc32(buffer, check)
    _CHECK.pack_into(frame, 0, check)
    return [frame, *apart]


def unseal(frames: Sequence[Any], ring: Optional[RingReader] = None) -> Tuple[int, int, Any, List[Any]]:
    """(protocol, kind, payload, arrays' bytes) of received frames. Raises CorruptFrame for bytes nobody sealed."""
    frame = memoryview(frames[0]) if frames else memoryview(b"")
    if len(frame) <= _HEAD_BYTES:
        raise CorruptFrame("a message without a head")
    check = crc32(frame[4:])
    for other in frames[1:]:
        check = crc32(other, check)
    claimed, length = _HEAD.unpack_from(frame)
    if check != claimed:
        raise CorruptFrame("the check sum of a message is wrong")
    ends = _HEAD_BYTES + length
    protocol, kind, payload, places = _parse(frame[_HEAD_BYTES:ends])
    if not places:
        return protocol, kind, payload, []
    return protocol, kind, payload, _arrays(places, frame, ends, frames[1:], ring)


def _arrays(places: Any, frame: Any, ends: int, apart: Sequence[Any], ring: Optional[RingReader]) -> List[Any]:
    arrays, taken, position = [], 0, ends + -ends % ALIGNMENT_BYTES
    try:
        for place in places:
            if type(place) is list and ring is not None:
                arrays.append(ring.take(*place))
            elif place < 0:
                arrays.append(apart[taken])
                taken += 1
            else:
                arrays.append(frame[position:position + place])
                position += place + -place % ALIGNMENT_BYTES
    except (TypeError, IndexError) as error:
        raise CorruptFrame(f"arrays are missing: {error}") from None
    if taken != len(apart) or position not in (len(frame), len(frame) + -len(frame) % ALIGNMENT_BYTES):
        raise CorruptFrame("the sizes of a message's arrays do not add up")
    return arrays


def _parse(body: Any) -> Tuple[int, int, Any, Any]:
    try:
        protocol, kind, payload, places = unpack(body)
    except (ValueError, TypeError) as error:
        raise CorruptFrame(f"a message that is no envelope: {error}") from None
    if type(protocol) is not int or type(kind) is not int or type(places) is not list:
        raise CorruptFrame("a message that is no envelope")
    return protocol, kind, payload, places
