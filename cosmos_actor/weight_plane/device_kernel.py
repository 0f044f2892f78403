"""Block sums by kernels of Triton: every byte is read once, for both lanes. Imports triton; see `device_digest`."""

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from cosmos_actor.weight_plane.digest import BLOCK_BYTES, BLOCK_WORDS

ROWS, WIDTH, WARPS = 4, 512, 4
"""Blocks that one program sums, so that a key is read once for four words, and words of each at a time: 16 of them and
their two sums are what a thread keeps in registers."""


@triton.jit(do_not_specialize=["blocks"])
def _sum(words, keys, sums, blocks, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < blocks
    column = tl.arange(0, WIDTH)
    first = tl.zeros((ROWS, WIDTH), dtype=tl.int64)
    second = tl.zeros((ROWS, WIDTH), dtype=tl.int64)
    for begin in range(0, BLOCK, WIDTH):
        at = begin + column
        word = tl.load(words + row[:, None] * BLOCK + at[None, :], mask=there[:, None], other=0).to(tl.int64)
        first += word * tl.load(keys + at)[None, :]
        second += word * tl.load(keys + BLOCK + at)[None, :]
    tl.store(sums + 2 * row, tl.sum(first, axis=1), mask=there)
    tl.store(sums + 2 * row + 1, tl.sum(second, axis=1), mask=there)


@triton.jit(do_not_specialize=["blocks"])
def _sum_scattered(addresses, counts, keys, sums, blocks, BLOCK: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
                   WIDTH: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < blocks
    # Without these hints every word would be loaded by itself.
    first_word = tl.multiple_of(tl.load(addresses + row, mask=there, other=0), 16).to(tl.pointer_type(tl.int32))
    count = tl.multiple_of(tl.load(counts + row, mask=there, other=0), 4)
    column = tl.arange(0, WIDTH)
    first = tl.zeros((ROWS, WIDTH), dtype=tl.int64)
    second = tl.zeros((ROWS, WIDTH), dtype=tl.int64)
    for begin in range(0, BLOCK, WIDTH):
        at = begin + column
        word = tl.load(first_word[:, None] + at[None, :], mask=at[None, :] < count[:, None], other=0).to(tl.int64)
        first += word * tl.load(keys + at)[None, :]
        second += word * tl.load(keys + BLOCK + at)[None, :]
    tl.store(sums + 2 * row, tl.sum(first, axis=1), mask=there)
    tl.store(sums + 2 * row + 1, tl.sum(second, axis=1), mask=there)


def sum_blocks(words: torch.Tensor, keys: torch.Tensor, sums: torch.Tensor) -> None:
    """words: [blocks, BLOCK_WORDS] int32, keys: [2, BLOCK_WORDS] int64, sums: [blocks, 2] int64, which is written. All
    contiguous, on one device."""
    blocks = len(words)
    with torch.cuda.device(words.device):
        _sum[(triton.cdiv(blocks, ROWS),)](words, keys, sums, blocks, BLOCK=BLOCK_WORDS, ROWS=ROWS, WIDTH=WIDTH,
                                           num_warps=WARPS)


def sum_scattered(places: tuple[tuple[int, int], ...], keys: torch.Tensor, sums: torch.Tensor) -> None:
    """places: address of each tensor, a multiple of 16, and how many words it has, one of 4; sums: [blocks, 2] int64 of
    one tensor after the other, which is written. All on one device."""
    with torch.cuda.device(keys.device):
        addresses, counts = _table(keys.device, places)
        _sum_scattered[(triton.cdiv(len(sums), ROWS),)](addresses, counts, keys, sums, len(sums), BLOCK=BLOCK_WORDS,
                                                        ROWS=ROWS, WIDTH=WIDTH, num_warps=WARPS)
        for one in (addresses, counts):  # another thread may push them out of the cache meanwhile
            one.record_stream(torch.cuda.current_stream())


@lru_cache(maxsize=4)
def _table(device: torch.device, places: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """([blocks] int64 address of each block, [blocks] int32 words that it has) for [(address, words), ...]: an engine's
    parameters stay where they are."""
    begins, words = np.array(places, np.int64).reshape(-1, 2).T
    blocks = -(-words // BLOCK_WORDS)
    number = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    addresses = np.repeat(begins, blocks) + number * BLOCK_BYTES
    counts = np.minimum(np.repeat(words, blocks) - number * BLOCK_WORDS, BLOCK_WORDS).astype(np.int32)
    return torch.from_numpy(addresses).to(device), torch.from_numpy(counts).to(device)
