"""The sums below the digest: numpy, torch and a few changes added give the same, and what is damaged is seen."""

from __future__ import annotations

import hashlib
import multiprocessing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_actor.weight_plane import digest
from cosmos_actor.weight_plane.digest import (
    BLOCK_WORDS,
    add_changes,
    block_sums,
    digest_of_sums,
    keys,
    raw,
    tensor_digest,
    tensor_sums,
    weights_digest,
)

UNITS = [np.uint8, np.uint16, np.uint32]
SIZES = st.sampled_from([0, 1, 3, 4, 5, 63, 4 * BLOCK_WORDS - 1, 4 * BLOCK_WORDS, 4 * BLOCK_WORDS + 7,
                         20 * BLOCK_WORDS + 2])


def some_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def by_definition(payload: np.ndarray) -> list[list[int]]:
    """The docstring in Python's own integers."""
    padded = bytes(payload) + bytes(-len(payload) % 4)
    words = [int.from_bytes(padded[at : at + 4], "little", signed=True) for at in range(0, len(padded), 4)]
    blocks = [words[at : at + BLOCK_WORDS] for at in range(0, len(words), BLOCK_WORDS)]
    lanes = [[int(key) for key in lane] for lane in keys()]
    return [[sum(key * word for key, word in zip(lane, block, strict=False)) % 2**64 for lane in lanes]
            for block in blocks]


def test_the_keys_are_those_of_the_definition():
    stream = hashlib.shake_128(b"cosmos-actor weights digest 2").digest(2 * BLOCK_WORDS * 8)
    first = int.from_bytes(stream[:8], "little", signed=True) | 1
    assert keys().shape == (2, BLOCK_WORDS) and int(keys()[0, 0]) == first and (keys()[0] % 2 == 1).all()


@pytest.mark.parametrize("nbytes", [0, 1, 6, 64, 4 * BLOCK_WORDS, 4 * BLOCK_WORDS + 5])
def test_the_sums_are_those_of_the_definition(nbytes):
    payload = some_bytes(nbytes)
    assert [[int(lane) % 2**64 for lane in block] for block in block_sums(payload)] == by_definition(payload)


def test_the_digest_is_sha256_of_dtype_shape_and_sums():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert tensor_digest(array) == hashlib.sha256(b'["float32", [2, 3]]' + block_sums(raw(array)).tobytes()).digest()
    assert tensor_digest(array) == digest_of_sums("float32", (2, 3), tensor_sums({"a": array})["a"])


@settings(max_examples=15, deadline=None)
@given(SIZES, st.integers(0, 9))
def test_torch_gives_the_same_sums(nbytes, seed):
    torch = pytest.importorskip("torch")
    from cosmos_actor.weight_plane.device_digest import block_sums_on

    payload = some_bytes(nbytes, seed)
    assert np.array_equal(block_sums_on(torch.from_numpy(payload)).numpy(), block_sums(payload))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64", "int8", "bool"])
def test_torch_gives_the_same_digests(dtype):
    torch = pytest.importorskip("torch")
    from cosmos_actor.weight_plane.device_digest import tensor_digest_on, weights_digest_on

    whole = torch.randn(7, 9).mul(50).to(getattr(torch, dtype))
    tensors = {"whole": whole, "part": whole[1:4, 2:5], "odd": whole.reshape(-1)[1:], "scalar": whole[0, 0],
               "empty": whole[:0]}
    host = {name: (tensor.contiguous().view(torch.uint16) if dtype == "bfloat16" else tensor).numpy()
            for name, tensor in tensors.items()}
    assert weights_digest_on(tensors) == weights_digest(host)
    assert all(tensor_digest_on(tensors[name]) == tensor_digest(host[name]) for name in tensors)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_digests():
    import torch

    from cosmos_actor.weight_plane.device_digest import weights_digest_on

    tensors = {"large": torch.randn(3000, 1001), "small": torch.randn(3), "half": torch.randn(777).half()}
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    assert weights_digest_on(on_gpu) == weights_digest({name: tensor.numpy() for name, tensor in tensors.items()})


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(UNITS), st.integers(1, 3 * BLOCK_WORDS), st.data())
def test_changes_added_give_the_sums_of_the_changed_tensor(unit, count, data):
    seed = data.draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    before = rng.integers(0, np.iinfo(unit).max, count, unit, endpoint=True)
    positions = np.sort(rng.choice(count, data.draw(st.integers(0, min(count, 300))), replace=False))
    after = before.copy()
    after[positions] = rng.integers(0, np.iinfo(unit).max, len(positions), unit, endpoint=True)
    sums = block_sums(raw(before))
    add_changes(sums, positions, before[positions], after[positions])
    assert np.array_equal(sums, block_sums(raw(after)))


def test_every_flipped_bit_of_a_small_tensor_is_seen():
    payload = some_bytes(96)
    seen = {block_sums(payload).tobytes()}
    for bit in range(8 * len(payload)):
        flipped = payload.copy()
        flipped[bit // 8] ^= np.uint8(1 << bit % 8)
        seen.add(block_sums(flipped).tobytes())
    assert len(seen) == 8 * len(payload) + 1


@given(st.integers(0, 40), st.integers(0, 40))
def test_every_pair_of_flipped_signs_is_seen(one, other):
    """Differences that are all multiples of a high power of two are the sums' weak side."""
    payload = some_bytes(41 * 4)
    flipped = payload.copy()
    for word in {one, other}:
        flipped[4 * word + 3] ^= 0x80
    assert block_sums(flipped).tobytes() != block_sums(payload).tobytes()


@given(st.integers(0, 2 * BLOCK_WORDS - 1), st.integers(0, 2 * BLOCK_WORDS - 1))
@settings(max_examples=50, deadline=None)
def test_exchanged_words_are_seen(one, other):
    words = np.arange(2 * BLOCK_WORDS, dtype=np.uint32)
    swapped = words.copy()
    swapped[[one, other]] = swapped[[other, one]]
    assert (tensor_digest(swapped) == tensor_digest(words)) == (one == other)


def test_exchanged_blocks_are_seen():
    words = np.random.default_rng(0).integers(0, 1 << 32, 3 * BLOCK_WORDS, np.uint32).reshape(3, BLOCK_WORDS)
    assert tensor_digest(words[[1, 0, 2]]) != tensor_digest(words)


def test_zeros_that_fill_up_are_told_from_zeros_that_are_there():
    assert tensor_digest(np.zeros(3, np.uint8)) != tensor_digest(np.zeros(4, np.uint8))


def test_a_forked_process_has_threads_of_its_own():
    model = {"large": some_bytes(2 * digest.PARALLEL_BYTES)}
    weights_digest(model)  # on threads that a fork does not take along
    forked = multiprocessing.get_context("fork").Process(target=weights_digest, args=(model,), daemon=True)
    forked.start()
    forked.join(30.0)
    forked.kill()
    assert forked.exitcode == 0


def test_threads_and_the_cut_among_them_change_nothing(monkeypatch):
    model = {"large": some_bytes(1 << 20), "odd": some_bytes(3 * (1 << 16) + 1), "small": some_bytes(5)}
    alone = weights_digest(model)
    monkeypatch.setattr(digest, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(digest, "TASK_BYTES", 4 * BLOCK_WORDS)
    assert weights_digest(model) == alone
