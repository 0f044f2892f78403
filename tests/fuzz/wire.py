"""What comes over a wire: envelopes, records of a lane, places in a ring, introductions, messages."""

from __future__ import annotations

import os
import random
from typing import Any
from zlib import crc32

import numpy as np

from cosmos_actor.bus import Identity, Limits
from cosmos_actor.bus.envelope import (
    ACK,
    HELLO,
    MESSAGE,
    OWN_FRAME_BYTES,
    PROTOCOL,
    PULSE,
    WORK,
    item,
    item_head,
    seal_control,
    seal_items,
    unseal,
)
from cosmos_actor.bus.errors import CorruptFrame, SchemaError
from cosmos_actor.bus.handshake import from_payload, introduce, judge, judge_welcome, to_payload
from cosmos_actor.bus.identity import host_id
from cosmos_actor.bus.lane import _RECORD, InTurn, LaneReader
from cosmos_actor.bus.ring import RingReader, RingWriter
from cosmos_actor.bus.schema import encode, from_plain, known_schemas, pack, schema_skew, unpack
from cosmos_actor.bus.sharing import Sharing
from tests.bus.messages import Everything, Inner, Number, Observation
from tests.fuzz.case import Broken, Case, Refused, until_the_end
from tests.fuzz.mutations import changed_bytes, changed_value, packed

RING_BYTES = 64 * 1024


# -- envelopes --------------------------------------------------------------------------------------------------------


def sealed(body: bytes, tail: bytes = b"", apart: tuple[bytes, ...] = ()) -> list[bytes]:
    """Frames with a right check sum over whatever this is: an attacker computes it as we do."""
    blank = len(body).to_bytes(4, "little") + body + bytes(-(8 + len(body)) % 16 if tail else 0) + tail
    check = crc32(blank)
    for other in apart:
        check = crc32(other, check)
    return [check.to_bytes(4, "little") + blank, *apart]


def captured(ring: RingWriter | None = None) -> list[list[bytes]]:
    """Messages as they are on the wire: control, items, small and large arrays, arrays in a ring."""
    arrays = [np.arange(50, dtype=np.float32).tobytes(), bytes(OWN_FRAME_BYTES + 5), bytes(5000), b"odd"]
    head = item_head(MESSAGE, WORK, 3, len(arrays)) + pack(["test.number", 1, 2, [7, "text"], None])
    plain = [item(ACK, WORK, 1, 9), item(PULSE, WORK, 3, [0.5, "compiling", [1, 2, 3]])]
    made = [seal_items([head, *plain], arrays, ring), seal_items(plain, []), seal_control(HELLO, ["x", 1])]
    return [[bytes(frame) for frame in frames] for frames in made]


class Envelopes:
    """`unseal`, beside a ring: broken bytes, broken bytes with a right check sum, broken values."""

    def __init__(self) -> None:
        self.ring = until_the_end(RingWriter(RING_BYTES))
        self.reader = until_the_end(RingReader(self.ring.offer()))
        self.messages = captured() + captured(self.ring)
        self.firsts = [frames[0] for frames in self.messages]
        self.bodies = [frame[8:8 + int.from_bytes(frame[4:8], "little")] for frame in self.firsts]

    def make(self, choose: random.Random) -> list[bytes]:
        number = choose.randrange(len(self.messages))
        first, *apart = self.messages[number]
        body, how = self.bodies[number], choose.randrange(4)
        tail = first[8 + len(body):]
        if how == 0:
            frames = [changed_bytes(first, self.firsts, choose), *apart]
        elif how == 1:
            frames = sealed(changed_bytes(body, self.bodies, choose), tail, tuple(apart))
        elif how == 2:
            frames = sealed(packed(changed_value(unpack(body), choose)), tail, tuple(apart))
        else:
            protocol, kind, payload, places = unpack(body)
            frames = sealed(packed([protocol, kind, payload, changed_value(places, choose)]), tail, tuple(apart))
        return frames[:choose.randint(0, len(frames))] if choose.random() < 0.05 else frames

    def decode(self, frames: list[bytes]) -> None:
        self.reader.taken = self.reader.freed = 0
        _, _, _, arrays = unseal(frames, self.reader)
        taken = self.reader.free()
        if type(taken) is not int or not 0 <= taken < 2**63:
            raise Broken(f"{taken!r} is to be told to the peer as what was read of its ring")
        for array in arrays:
            memoryview(array)


# -- the lane ---------------------------------------------------------------------------------------------------------


class LaneRecords:
    """What comes through the pipe, in pieces of any size, and its order beside the socket's messages."""

    def __init__(self) -> None:
        inline = 2**64 - 1
        self.captured = [
            _RECORD.pack(1, inline, 5) + b"hello" + _RECORD.pack(2, 4096, 70_000) + _RECORD.pack(3, inline, 0),
            b"".join(_RECORD.pack(number, inline, 40) + bytes(40) for number in range(1, 20)),
        ]

    def make(self, choose: random.Random) -> list[bytes]:
        data, pieces = changed_bytes(choose.choice(self.captured), self.captured, choose), []
        while data:
            size = choose.choice((1, 7, 20, 4096, 65536))
            pieces.append(data[:size])
            data = data[size:]
            if len(pieces) > 200:
                break
        return pieces

    def decode(self, pieces: list[bytes]) -> None:
        reader, turn = LaneReader(), InTurn()
        try:
            for piece in pieces:
                for frames in reader.split(piece):
                    for message in turn.take(frames):
                        self._look(message)
                if len(reader._rest) > 8192:
                    raise Broken(f"{len(reader._rest)} bytes wait for the rest of a record")
        finally:
            reader.close()

    def _look(self, message: list[Any]) -> None:
        if type(message[0]) is not tuple and len(message[0]) > 4096:
            raise Broken("a record is longer than the pipe takes at once")


# -- offers -----------------------------------------------------------------------------------------------------------


class Offers:
    """How to open the peer's ring and lane: what can not be opened is not used, and nothing is raised."""

    def __init__(self) -> None:
        self.other = until_the_end(Sharing(RING_BYTES))
        self.offer = self.other.offer()

    def make(self, choose: random.Random) -> bytes:
        return packed(changed_value(self.offer, choose))

    def decode(self, data: bytes) -> None:
        try:
            offer = unpack(data)
        except ValueError as error:
            raise Refused(str(error)) from None
        ours = Sharing(RING_BYTES)
        try:
            before = len(os.listdir("/proc/self/fd"))
            ours.accept(offer, host_id())
            lane = ours._lane_out
            if lane is not None and os.readlink(f"/proc/self/fd/{lane._fd}") != os.readlink(
                    f"/proc/{int(offer[0][0])}/fd/{int(offer[1])}"):
                raise Broken("the lane leads somewhere else")
            ours.close()
            if len(os.listdir("/proc/self/fd")) > before:
                raise Broken("a descriptor was left open")
        finally:
            ours.close()


# -- introductions ----------------------------------------------------------------------------------------------------


class Introductions:
    """HELLO and WELCOME: the payload, and the judgement of both sides on it."""

    def __init__(self) -> None:
        ours = Identity("run", "rollout", "rollout-0", "life-1")
        theirs = Identity("run", "controller", "controller-0", "life-2")
        self.ours = introduce(ours, Limits(), known_schemas(), "host", "s1")
        self.plain = to_payload(introduce(theirs, Limits(), known_schemas(), "host", "s1", "rollout", "rollout-0",
                                          [[1, 2, b"x" * 16, 4], 5]))
        self.data = pack(self.plain)

    def make(self, choose: random.Random) -> bytes:
        if choose.random() < 0.3:
            return changed_bytes(self.data, [self.data, b"\x90"], choose)
        return packed(changed_value(self.plain, choose))

    def decode(self, data: bytes) -> None:
        try:
            payload = unpack(data)
        except ValueError as error:
            raise Refused(str(error)) from None
        theirs = from_payload(payload)
        for line in (judge(self.ours, theirs, "controller"), judge_welcome(self.ours, theirs),
                     schema_skew(self.ours.schemas, theirs.schemas)):
            if line is not None and len(line) > 20_000:
                raise Broken(f"a reason of {len(line)} characters")


# -- messages ---------------------------------------------------------------------------------------------------------


class Messages:
    """A message's values and arrays against its schema."""

    def __init__(self) -> None:
        inner = Inner(np.arange(3, dtype=np.float32))
        note = {"a": [1, None, {"b": b"x"}], "c": 1.5}
        image, joints = np.zeros((2, 3, 3), np.uint8), np.ones(4)
        everything = Everything(True, 7, 0.5, "text", b"blob", None, ["a", "b"], {"k": 1}, [inner, inner],
                                {"x": np.arange(6).reshape(2, 3)}, np.zeros(4, np.uint16))
        made = [everything, Observation("e", image, joints, np.zeros((4, 2)), note), Number(1, "x")]
        self.messages = [encode(message) for message in made]
        self.heads = [head for head, _ in self.messages]

    def make(self, choose: random.Random) -> list[bytes]:
        head, buffers = choose.choice(self.messages)
        kept = [bytes(buffer) for buffer in buffers]
        if choose.random() < 0.3:
            return [changed_bytes(head, self.heads, choose), *kept]
        name, version, fingerprint, plain = unpack(head)
        if choose.random() < 0.1:
            return [packed(changed_value([name, version, fingerprint, plain], choose)), *kept]
        if kept and choose.random() < 0.2:
            kept[choose.randrange(len(kept))] = bytes(choose.choice((0, 1, 7, 64, 4096)))
        return [packed([name, version, fingerprint, changed_value(plain, choose)]), *kept]

    def decode(self, frames: list[bytes]) -> None:
        try:
            parts = unpack(frames[0])
        except ValueError as error:
            raise Refused(str(error)) from None
        if type(parts) is not list or len(parts) != 4 or type(parts[0]) is not str:
            raise Refused("no message")
        message, _ = from_plain((parts[0], parts[1], parts[2]), parts[3], frames[1:])
        encode(message)


class Unpacked:
    """msgpack itself: plain values come out, or ValueError."""

    def __init__(self) -> None:
        identity = Identity("run", "a", "a-0", "1")
        self.captured = [pack(to_payload(introduce(identity, Limits(), known_schemas(), "", ""))),
                         pack([PROTOCOL, HELLO, {"k": [1, 2.5, None, True, "text", b"bytes"]}, []])]

    def make(self, choose: random.Random) -> bytes:
        return changed_bytes(choose.choice(self.captured), self.captured, choose)

    def decode(self, data: bytes) -> None:
        open_ends = [unpack(data)]
        while open_ends:
            value = open_ends.pop()
            if type(value) is list:
                open_ends += value
            elif type(value) is dict:
                open_ends += [*value, *value.values()]
            elif value is not None and type(value) not in (bool, int, float, str, bytes):
                raise Broken(f"a {type(value).__name__} came out")


def cases() -> list[Case]:
    envelopes, records, offers = Envelopes(), LaneRecords(), Offers()
    introductions, messages, unpacked = Introductions(), Messages(), Unpacked()
    return [
        Case("msgpack", unpacked.make, unpacked.decode, (ValueError,)),
        Case("envelope and ring places", envelopes.make, envelopes.decode, (CorruptFrame,), 4 * RING_BYTES),
        Case("lane records", records.make, records.decode, (CorruptFrame,)),
        Case("offers of a ring and a lane", offers.make, offers.decode, (), 2 * RING_BYTES),
        Case("introductions", introductions.make, introductions.decode, (CorruptFrame,)),
        Case("messages", messages.make, messages.decode, (SchemaError,)),
    ]
