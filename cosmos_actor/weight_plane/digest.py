"""Content digests of tensors and of whole models: keyed sums over blocks, and SHA-256 over the sums.

    bytes ──> 32-bit words ──> blocks of 16,384 words ──> 2 sums a block ──> SHA-256 with dtype and shape ──> digest

Two mappings have the same digest only if they hold the same names with the same dtype, shape and bytes (decision 18
says with what odds); the order in which they were put in does not matter. The sums are plain arithmetic of 64-bit
integers, so a GPU computes them where the weights are (`device_digest`), and they follow a few changed elements without
a look at the others (`add_changes`). bfloat16 is the dtype of uint16 storage: no model has uint16 weights, and numpy
has no bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np

BLOCK_WORDS = 1 << 14
"""A power of two. The keys of all positions and lanes (256 KiB) stay in a core's cache, the sums are 1/4096 of the
bytes. Part of the digest's definition."""
BLOCK_BYTES = 4 * BLOCK_WORDS
LANES = 2
"""Sums a block, each with keys of its own: the odds of one are not enough."""
KEY_SEED = b"cosmos-actor weights digest 2"
"""The keys are SHAKE-128 of this. They are no secret: see decision 18."""
CHUNK_BLOCKS = 16
"""Summed by one call of numpy: 1 MiB, so that a thread works for 300 us without the interpreter's lock."""
TASK_BYTES = 16 << 20
"""Of one tensor for one thread."""
PARALLEL_BYTES = 8 << 20
"""Below this the threads cost more than they save."""
MAX_THREADS = 8
"""Digests of one model run at memory bandwidth long before they need more."""


def stored(array: np.ndarray) -> tuple[str, np.ndarray]:
    """(dtype name, the same bytes as a contiguous native array), without a copy where it is one already."""
    name = array.dtype.name
    if name in ("bfloat16", "uint16"):
        array, name = array.view(np.uint16), "bfloat16"
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return name, array if array.flags.c_contiguous else np.ascontiguousarray(array)


def raw(array: np.ndarray) -> np.ndarray:
    """[nbytes] uint8 view of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def tensor_digest(array: np.ndarray) -> bytes:
    """32 bytes that change with dtype, shape or any byte of the tensor."""
    name, plain = stored(array)
    return digest_of(name, plain.shape, raw(plain))


def digest_of(dtype: str, shape: Iterable[int], payload: np.ndarray) -> bytes:
    """`tensor_digest` of the tensor with these bytes. payload: [nbytes] uint8."""
    return digest_of_sums(dtype, shape, block_sums(payload))


def digest_of_sums(dtype: str, shape: Iterable[int], sums: np.ndarray) -> bytes:
    """`tensor_digest` from `block_sums` of the tensor's bytes."""
    made = _begun(dtype, tuple(shape)).copy()
    made.update(np.ascontiguousarray(sums, "<i8").data)
    return made.digest()


@lru_cache(maxsize=4096)
def _begun(dtype: str, shape: tuple[int, ...]) -> hashlib._Hash:
    return hashlib.sha256(json.dumps([dtype, [int(size) for size in shape]]).encode())


def tensor_digests(tensors: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Name -> `tensor_digest`, on several threads where that is worth it."""
    return {name: digest_of_sums(*facts, sums) for name, (facts, sums) in _sums_of(tensors).items()}


def tensor_sums(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Name -> `block_sums`, on several threads where that is worth it."""
    return {name: sums for name, (_, sums) in _sums_of(tensors).items()}


def weights_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """64 hex digits for a whole model."""
    return combined_digest(tensor_digests(tensors))


def combined_digest(digests: Mapping[str, bytes]) -> str:
    """`weights_digest` from the digests of the tensors."""
    table = [[name, digests[name].hex()] for name in sorted(digests)]
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def block_count(nbytes: int) -> int:
    """Blocks that so many bytes lie in, the last of which may not be full."""
    return -(-nbytes // BLOCK_BYTES)


def no_sums(nbytes: int) -> np.ndarray:
    """[blocks, LANES] int64 zeros for so many bytes: the sums of as many zeros."""
    return np.zeros((block_count(nbytes), LANES), np.int64)


def block_sums(payload: np.ndarray) -> np.ndarray:
    """[blocks, LANES] int64: of each block, per lane, the sum of key x word modulo 2**64.

    payload: [nbytes] uint8. Words are little-endian and signed; zeros fill up the last one.
    """
    sums = no_sums(payload.nbytes)
    sum_into(sums, payload, 0)
    return sums


def sum_into(sums: np.ndarray, payload: np.ndarray, block: int) -> None:
    """Write the sums of `payload`, which begins with block number `block` of its tensor, into their places."""
    words = _words(payload)
    whole = len(words) // BLOCK_WORDS
    rows = words[: whole * BLOCK_WORDS].reshape(whole, BLOCK_WORDS)
    for begin in range(0, whole, CHUNK_BLOCKS):
        part = rows[begin : begin + CHUNK_BLOCKS].astype(np.int64)
        sums[block + begin : block + begin + len(part)] = np.einsum("ri,ki->rk", part, keys())
    rest = words[whole * BLOCK_WORDS :].astype(np.int64)
    if len(rest):
        sums[block + whole] = np.einsum("i,ki->k", rest, keys()[:, : len(rest)])


def add_changes(sums: np.ndarray, positions: np.ndarray, old: np.ndarray, new: np.ndarray) -> None:
    """Make the sums of a tensor those of the same tensor with `new` at `positions` in the place of `old`.

    positions: [n] ascending, of elements of 1, 2 or 4 bytes; old, new: [n] unsigned integers of that size.
    """
    per_word = 4 // new.dtype.itemsize
    word = positions // per_word
    difference = _in_word(new, positions, per_word) - _in_word(old, positions, per_word)
    blocks = word // BLOCK_WORDS
    starts = np.flatnonzero(np.r_[True, blocks[1:] != blocks[:-1]]) if len(blocks) else np.zeros(0, np.int64)
    place = word % BLOCK_WORDS
    for lane, key in enumerate(keys()):
        if len(starts):
            sums[blocks[starts], lane] += np.add.reduceat(difference * key[place], starts)


@lru_cache(maxsize=1)
def keys() -> np.ndarray:
    """[LANES, BLOCK_WORDS] int64. Those of lane 0 are odd, so that it sees every change of a single word."""
    stream = hashlib.shake_128(KEY_SEED).digest(LANES * BLOCK_WORDS * 8)
    made = np.frombuffer(stream, "<i8").reshape(LANES, BLOCK_WORDS).astype(np.int64)
    made[0] |= 1
    made.flags.writeable = False
    return made


def _words(payload: np.ndarray) -> np.ndarray:
    if payload.nbytes % 4:
        payload = np.concatenate([payload, np.zeros(-payload.nbytes % 4, np.uint8)])
    return payload.view("<i4")


def _in_word(values: np.ndarray, positions: np.ndarray, per_word: int) -> np.ndarray:
    """[n] int64: what each element adds to the signed word that it lies in."""
    bits = 8 * values.dtype.itemsize
    shift = (positions % per_word * bits).astype(np.uint32)
    return (values.astype(np.uint32) << shift).view(np.int32).astype(np.int64)


def _sums_of(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[tuple[str, tuple[int, ...]], np.ndarray]]:
    """Name -> ((dtype, shape), sums). A large tensor is shared out among the threads."""
    found, tasks = {}, []
    for name, array in tensors.items():
        dtype, plain = stored(array)
        payload, sums = raw(plain), no_sums(plain.nbytes)
        found[name] = ((dtype, plain.shape), sums)
        for begin in range(0, payload.nbytes, TASK_BYTES):
            tasks.append((sums, payload[begin : begin + TASK_BYTES], begin // BLOCK_BYTES))
    if sum(array.nbytes for array in tensors.values()) < PARALLEL_BYTES:
        for task in tasks:
            sum_into(*task)
    else:
        list(threads().map(lambda task: sum_into(*task), tasks))
    return found


@lru_cache(maxsize=1)
def threads() -> ThreadPoolExecutor:
    """Shared by all that looks at every byte of a model; whoever works in it does not wait for it."""
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "digest")


os.register_at_fork(after_in_child=threads.cache_clear)  # a forked worker has none of them, and would wait for ever
