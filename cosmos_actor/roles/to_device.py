"""Tensors of the host into a GPU's memory: threads fill one piece of pinned memory while the other is on its way.

    sources ──threads──> piece A ──copy engine──> targets
            ──threads──> piece B

Memory that is not pinned reaches a GPU at a tenth of the wire's pace, and one thread fills pinned memory at a fifth.
On a CPU the pieces are plain memory, and all else is the same. Imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

PIECE_BYTES = 64 << 20
"""A millisecond of the wire's: the first piece, which nothing overlaps, costs no more."""
THREADS = min(8, os.cpu_count() or 1)
"""Together they fill a piece in two or three times what it takes to leave (16 cores), one alone in five."""
ALIGNED_BYTES = 16
"""Where each tensor begins in a piece."""


class Part(NamedTuple):
    """Bytes `begin` to `end` of tensor number `tensor`, `at` byte `at` of the piece."""

    tensor: int
    begin: int
    end: int
    at: int


@torch.inference_mode()
def copy_to_device(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Each of `sources`, on the host, into its target, all on one device. Returns when all has arrived.

    Raises ValueError, before the first byte, for a target of another dtype or shape, or that is not contiguous.
    """
    for source, target in zip(sources, targets, strict=True):
        if (source.dtype, source.shape) != (target.dtype, target.shape) or not target.is_contiguous():
            raise ValueError(f"{source.dtype} {list(source.shape)} does not go into {target.dtype} "
                             f"{list(target.shape)} with strides {target.stride()}")
    if not sources:
        return
    device = targets[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _copy(sources, targets, device)


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], device: torch.device) -> None:
    pieces = [_Piece(device) for _ in range(2)]
    read, written = [_bytes_of(one).numpy() for one in sources], [_bytes_of(one) for one in targets]
    with ThreadPoolExecutor(THREADS, "to-device") as threads:
        for number, parts in enumerate(cut([one.nbytes for one in sources], PIECE_BYTES)):
            pieces[number % 2].bring(parts, read, written, threads)
        for piece in pieces:
            piece.wait()


def cut(sizes: Sequence[int], piece_bytes: int) -> Iterator[list[Part]]:
    """The parts of each piece, for tensors of so many bytes, one after the other; a tensor goes on in the next piece.
    piece_bytes: a multiple of ALIGNED_BYTES."""
    parts: list[Part] = []
    at = 0
    for tensor, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if at == piece_bytes:
                yield parts
                parts, at = [], 0
            end = min(size, begin + piece_bytes - at)
            parts.append(Part(tensor, begin, end, at))
            at = min(piece_bytes, at + -(-(end - begin) // ALIGNED_BYTES) * ALIGNED_BYTES)
            begin = end
    if parts:
        yield parts


class _Piece:
    """Memory that is not written to before what is in it has arrived."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        self._array = self._memory.numpy()
        self._arrived: Any = torch.cuda.Event() if on_gpu else None

    def bring(self, parts: Sequence[Part], read: Sequence[np.ndarray], written: Sequence[torch.Tensor],
              threads: ThreadPoolExecutor) -> None:
        self.wait()
        end = parts[-1].at + parts[-1].end - parts[-1].begin
        share = -(-end // THREADS)

        def fill(first: int) -> None:
            for part in parts:
                begin, stop = max(first, part.at), min(first + share, part.at + part.end - part.begin)
                if begin < stop:
                    skipped = part.begin - part.at
                    np.copyto(self._array[begin:stop], read[part.tensor][begin + skipped : stop + skipped])

        list(threads.map(fill, range(0, end, share)))
        for part in parts:
            written[part.tensor][part.begin : part.end].copy_(
                self._memory[part.at : part.at + part.end - part.begin], non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[nbytes] uint8, the same memory if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
