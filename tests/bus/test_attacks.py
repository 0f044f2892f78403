"""What a peer with a valid key can send to hurt: each of these once did. Found by `python -m tests.fuzz`."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Any, List

import msgpack
import pytest

from cosmos_actor.bus import CorruptFrame, KeyFileError, KeyRing, SchemaError
from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.wire import unpack_ask, unpack_reply
from cosmos_actor.bus.errors import BulkError, BusError
from cosmos_actor.bus.faults import Faults
from cosmos_actor.bus.identity import host_id
from cosmos_actor.bus.lane import HELD_BYTES, NUMBER, InTurn
from cosmos_actor.bus.latest import LatestOutbox
from cosmos_actor.bus.ring import RingWriter
from cosmos_actor.bus.schema import decode, pack, schema_key, unpack
from cosmos_actor.bus.sharing import Sharing
from tests.bulk.tools import elsewhere, pattern, reader, served, store
from tests.bus.messages import Observation

DEEP = b"\x91" * 900 + b"\xc0"


def deep(plain: Any) -> bytes:
    """msgpack in which the text "deep" is a list in a list in a list .."""
    return pack(plain).replace(pack("deep"), DEEP)


def test_lists_that_claim_to_be_long_reserve_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = (b"\xdd" + (2**20).to_bytes(4, "big")) * 900 + bytes(2**20)
    parsed: List[Any] = []
    monkeypatch.setattr(msgpack, "unpackb", lambda *arguments, **options: parsed.append(arguments))
    with pytest.raises(ValueError, match="not msgpack"):
        unpack(bomb)
    assert not parsed, "8 GB were reserved for it by msgpack 1.1"


def test_a_json_value_nested_too_deep_is_a_schema_error() -> None:
    head = deep([*schema_key(Observation), ["e", [0, "uint8", [1, 1, 3]], [1, "float64", [1]], None, "deep"]])
    with pytest.raises(SchemaError, match="test.observation: a Json value is nested too deep"):
        decode(head, [bytes(3), bytes(8)])


def test_a_lane_is_a_descriptor_and_no_path(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    opened = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    ring, ours = RingWriter(MIB), Sharing(MIB)
    ours.accept([ring.offer(), f"../../..{fifo}"], host_id())
    assert not ours.has_lane
    ours.close()
    ring.close()
    os.close(opened)


def test_messages_ahead_of_their_turn_are_held_up_to_a_size() -> None:
    turn, frame = InTurn(), bytes(HELD_BYTES // 4)
    for number in range(2, 6):
        assert turn.take([frame, NUMBER.pack(number)]) == ()
    with pytest.raises(CorruptFrame, match="wait for message 1"):
        turn.take([frame, NUMBER.pack(6)])


def test_the_confirmation_of_a_topic_that_was_never_published_is_not_kept() -> None:
    box = LatestOutbox(4)
    assert box.confirm("nobody's", 7) is None and not box._confirmed


@pytest.mark.parametrize("frames", [[deep([1, b"12345678", "deep"])], [deep(["deep", b"12345678", "no"])]])
def test_a_reply_with_a_reason_that_is_none_is_corrupt(frames: List[bytes]) -> None:
    with pytest.raises(CorruptFrame):
        unpack_reply(frames)


def test_an_ask_of_a_protocol_that_is_none_is_corrupt() -> None:
    with pytest.raises(CorruptFrame):
        unpack_ask([deep(["deep", *[0] * 6])])


WRONG = [{"shape": (0, 2**62, 4), "nbytes": 0}, {"generation": -1}, {"generation": 2**64 - 1}, {"arena": b"short"},
         {"address": "nonsense"}, {"address": "inproc://x"}, {"address": "tcp://127.0.0.1:99999999"},
         {"address": "tcp://\x00"}]


def test_a_reference_that_is_nonsense_is_refused_and_the_streams_of_others_go_on() -> None:
    async def both(there: BulkReader, good: BulkRef, wrong: List[BulkRef]) -> None:
        for ref in wrong:
            with pytest.raises(BusError):
                await there.fetch(ref, deadline_s=10.0)
        assert (await there.fetch(good, deadline_s=10.0)).nbytes == 5000

    with store() as made, served(made), reader() as there:
        good = elsewhere(made.try_put(pattern(5000), holder="a"))
        asyncio.run(both(there, good, [elsewhere(good, **changes) for changes in WRONG]))


@pytest.mark.parametrize("size", [0, 10, 4096])
def test_memory_that_is_no_arena_is_refused(size: int) -> None:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with store() as made:
        good = made.try_put(pattern(8), holder="a")
        wrong = BulkRef(**{**good.__dict__, "fd": fd, "arena": bytes(16), "arena_bytes": size, "offset": 0, "nbytes": 0,
                           "shape": (0,)})
        there = BulkReader(BulkSettings(), None)
        with pytest.raises(BulkError):
            asyncio.run(there.fetch(wrong, deadline_s=1.0))
        there.close()
    os.close(fd)


def test_key_files_that_never_end_or_are_no_texts(tmp_path: Path) -> None:
    path = tmp_path / "policy.key"
    os.mkfifo(path, 0o600)
    with pytest.raises(KeyFileError, match="is not a key file"):
        KeyRing.load(path)
    path.unlink()
    path.touch(0o600)
    for text in (b"[" * 100_000, b'{"a":' * 100_000):
        path.write_bytes(text)
        with pytest.raises(KeyFileError, match="is not a key file"):
            KeyRing.load(path)
    os.truncate(path, 1 << 42)
    with pytest.raises(KeyFileError, match="is not a key file"):
        KeyRing.load(path)


@pytest.mark.parametrize("words", ["delay=" + "9" * 400 + "s", "partition=policy:" + "9" * 400 + "s"])
def test_times_that_no_timer_takes_are_refused(words: str) -> None:
    with pytest.raises(BusError, match="setting `bus.faults`"):
        Faults.parse(words)
