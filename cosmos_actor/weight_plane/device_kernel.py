"""Block sums by one kernel of Triton: every byte is read once, for both lanes. Imports triton; see `device_digest`."""

import torch
import triton
import triton.language as tl

from cosmos_actor.weight_plane.digest import BLOCK_WORDS

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


def sum_blocks(words: torch.Tensor, keys: torch.Tensor, sums: torch.Tensor) -> None:
    """words: [blocks, BLOCK_WORDS] int32, keys: [2, BLOCK_WORDS] int64, sums: [blocks, 2] int64, which is written. All
    contiguous, on one device."""
    blocks = len(words)
    with torch.cuda.device(words.device):
        _sum[(triton.cdiv(blocks, ROWS),)](words, keys, sums, blocks, BLOCK=BLOCK_WORDS, ROWS=ROWS, WIDTH=WIDTH,
                                           num_warps=WARPS)
