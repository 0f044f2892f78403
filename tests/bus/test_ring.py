"""The ring of shared memory: nothing is overwritten before it was read, nothing outside is read, nothing is left."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.bus import BusError, CorruptFrame
from cosmos_actor.bus.envelope import ACK, WORK, item, seal_items, unseal
from cosmos_actor.bus.ring import SHARED_FROM_BYTES, RingReader, RingWriter

CAPACITY = 64 * 1024


@pytest.fixture
def ends() -> Iterator[tuple[RingWriter, RingReader]]:
    writer = RingWriter(CAPACITY)
    reader = RingReader(writer.offer())
    yield writer, reader
    reader.close()
    writer.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, CAPACITY // 2)), max_size=80))
def test_what_is_put_is_taken_in_order_and_never_overwritten_before(steps: list[tuple[bool, int]]) -> None:
    writer = RingWriter(CAPACITY)
    reader = RingReader(writer.offer())
    under_way: list[tuple[int, bytes]] = []
    for number, (put, size) in enumerate(steps):
        if put:
            data = bytes([number % 256]) * size
            position = writer.put(data)
            assert position is not None or under_way, "an empty ring has room"
            if position is not None:
                under_way.append((position, data))
        elif under_way:
            position, data = under_way.pop(0)
            assert reader.take(position, len(data)) == data
            writer.free(reader.free())
    for position, data in under_way:
        assert reader.take(position, len(data)) == data
        reader.free()
    reader.close()
    writer.close()


def test_a_full_ring_says_no_and_has_room_again_after_reading(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    half = bytes(CAPACITY // 2)
    first, second = writer.put(half), writer.put(half)
    assert (first, second) == (0, CAPACITY // 2) and writer.put(b"x") is None
    reader.take(0, len(half))
    assert writer.put(b"x") is None, "the writer has not heard of it"
    writer.free(reader.taken)
    assert writer.put(b"x") is not None
    assert writer.put(bytes(CAPACITY + 1)) is None


def test_an_empty_ring_begins_again_at_its_first_byte(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    for _ in range(5):
        position = writer.put(b"x" * 5000)
        assert position is not None and position % CAPACITY == 0
        reader.take(position, 5000)
        writer.free(reader.taken)


def test_places_outside_are_corrupt(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    writer.put(bytes(5000))
    for place in ((0, CAPACITY + 1), (CAPACITY - 10, 11), (0, -1), (0, 1.5)):
        with pytest.raises(CorruptFrame, match="outside its ring"):
            reader.take(*place)  # type: ignore[arg-type]
    reader.take(0, 5000)
    assert reader.free() == 5056
    with pytest.raises(CorruptFrame):
        reader.take(0, 5000)
    with pytest.raises(ValueError, match="never written"):
        writer.free(10_000)


def test_a_message_can_not_have_more_in_the_ring_than_the_ring_or_the_link_takes() -> None:
    writer = RingWriter(CAPACITY)
    whole, limited = RingReader(writer.offer()), RingReader(writer.offer(), 5000)
    for reader, times in ((whole, CAPACITY // 4096), (limited, 1)):
        for _ in range(times):
            reader.take(0, 4096)
        with pytest.raises(CorruptFrame, match="a message with more than"):
            reader.take(0, 4096)
        reader.close()
    writer.close()


@pytest.mark.parametrize("position", [0.0, 2**63, float("nan"), "0", None, True, -1])
def test_a_position_that_is_none_is_corrupt(ends: tuple[RingWriter, RingReader], position: object) -> None:
    with pytest.raises(CorruptFrame, match="outside its ring"):
        ends[1].take(position, 1)  # type: ignore[arg-type]


def test_the_reader_can_not_write(ends: tuple[RingWriter, RingReader]) -> None:
    with pytest.raises(TypeError):
        ends[1]._view.mapping[0:1] = b"x"


def test_large_arrays_go_through_the_ring_and_small_ones_do_not(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    large, small = bytes(range(256)) * (SHARED_FROM_BYTES // 256), b"small"
    frames = seal_items([item(ACK, WORK, 1)], [small, large, small], writer)
    assert len(frames) == 1 and len(frames[0]) < 200 and writer.arrays == 1
    assert [bytes(array) for array in unseal(frames, reader)[3]] == [small, large, small]
    with pytest.raises(CorruptFrame):
        unseal(frames)


def test_without_room_arrays_take_the_socket(ends: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ends
    writer.put(bytes(CAPACITY))
    large = bytes(SHARED_FROM_BYTES)
    frames = seal_items([item(ACK, WORK, 1)], [large], writer)
    assert len(frames[0]) > SHARED_FROM_BYTES
    assert [bytes(array) for array in unseal(frames, reader)[3]] == [large]


def test_what_is_no_ring_is_not_opened() -> None:
    writer = RingWriter(CAPACITY)
    pid, fd, token, size = writer.offer()
    other = os.memfd_create("other")
    os.ftruncate(other, size)
    for offer in (None, [], [pid, fd, token], [pid, fd, bytes(16), size], [pid, fd, token, size + 4096],
                  [pid, other, token, size], [pid, 0, token, size], [2**22 - 1, fd, token, size]):
        with pytest.raises(BusError):
            RingReader(offer)
    os.close(other)
    writer.close()
