"""Bytes in, bytes out; and one flipped bit, wherever it is."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.bus.envelope import (
    ACK,
    DATA,
    HELLO,
    MESSAGE,
    OWN_FRAME_BYTES,
    PROTOCOL,
    WORK,
    item,
    item_head,
    seal_control,
    seal_items,
    unseal,
)
from cosmos_actor.bus.errors import CorruptFrame
from cosmos_actor.bus.faults import flip_bit
from cosmos_actor.bus.schema import pack

BUFFERS = st.lists(st.binary(max_size=100), max_size=5)


@given(BUFFERS, st.lists(st.integers(1, 2**40), min_size=1, max_size=4))
def test_what_was_sealed_is_unsealed(buffers: list[bytes], numbers: list[int]) -> None:
    items = [item(ACK, WORK, number, number) for number in numbers]
    frames = [bytes(frame) for frame in seal_items(items, buffers)]
    protocol, kind, payload, arrays = unseal(frames)
    assert (protocol, kind) == (PROTOCOL, DATA) and len(frames) == 1
    assert payload == [[ACK, WORK, number, 0, number] for number in numbers]
    assert [bytes(array) for array in arrays] == buffers


def test_a_large_array_has_a_frame_of_its_own() -> None:
    large, small = bytes(range(256)) * (OWN_FRAME_BYTES // 256 + 1), b"small"
    frames = [bytes(frame) for frame in seal_items([item(ACK, WORK, 1)], [small, large, small])]
    assert len(frames) == 2
    assert [bytes(array) for array in unseal(frames)[3]] == [small, large, small]


def test_arrays_are_aligned_inside_the_frame() -> None:
    frames = [bytes(frame) for frame in seal_items([item(ACK, WORK, 1)], [b"abc", bytes(range(16)), b"x"])]
    for array in unseal(frames)[3]:
        offset = np.frombuffer(array, np.uint8).ctypes.data - np.frombuffer(frames[0], np.uint8).ctypes.data
        assert offset % 16 == 0


def captured() -> list[bytes]:
    """A message as it is on the wire: two items, small and large arrays."""
    arrays = [np.arange(50, dtype=np.float32).tobytes(), bytes(OWN_FRAME_BYTES + 5), b"odd"]
    head = item_head(MESSAGE, WORK, 3, 3) + pack(["test.number", 1, 2, [7, "text"], None])
    return [bytes(frame) for frame in seal_items([head, item(ACK, WORK, 1, 9)], arrays)]


def test_any_flipped_bit_of_the_small_frame_is_noticed() -> None:
    frames = captured()
    for bit in range(8 * len(frames[0])):
        with pytest.raises(CorruptFrame):
            unseal(flip_bit(frames, bit))
    assert unseal(frames)


def test_flipped_bits_of_the_large_frame_are_noticed() -> None:
    frames = captured()
    first, length = 8 * len(frames[0]), 8 * len(frames[1])
    choice = random.Random(0)
    for bit in [0, 1, length - 1, length - 8, *(choice.randrange(length) for _ in range(200))]:
        with pytest.raises(CorruptFrame):
            unseal(flip_bit(frames, first + bit))


@pytest.mark.slow
def test_a_flipped_bit_in_any_byte_of_the_large_frame_is_noticed() -> None:
    """Each byte once, the bit by its place; all bits of all bytes would be a million digests of the frame."""
    small, large = captured()
    flipped = bytearray(large)
    for place in range(len(flipped)):
        flipped[place] ^= 1 << place % 8
        with pytest.raises(CorruptFrame):
            unseal([small, flipped])
        flipped[place] ^= 1 << place % 8
    assert flipped == large and unseal([small, flipped])


@pytest.mark.parametrize("frames", [[], [b""], [b"1234567"], [bytes(16)], [b"\xff" * 100]])
def test_bytes_that_nobody_sealed_are_corrupt(frames: list[bytes]) -> None:
    with pytest.raises(CorruptFrame):
        unseal(frames)


def test_missing_and_added_frames_are_corrupt() -> None:
    frames = captured()
    cut, grown = [frames[0][:-1], frames[1]], [frames[0] + b"x", frames[1]]
    for wrong in ([frames[0]], [*frames, b"more"], frames[1:], cut, grown):
        with pytest.raises(CorruptFrame):
            unseal(wrong)


@given(st.binary(max_size=200))
def test_random_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptFrame):
        unseal([data])


def test_control_messages() -> None:
    assert unseal(seal_control(HELLO, ["x", 1])) == (PROTOCOL, HELLO, ["x", 1], [])
