"""`tensor_digest` of a torch tensor, computed on its device: 16 bytes a block come to the host, and no weights.

Sums are plain operations of torch. On a GPU where Triton is there, one kernel reads the bytes once instead; it is used
after it has found the same sums as torch in this process, and never where it has not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from cosmos_actor.weight_plane.digest import (
    BLOCK_WORDS,
    LANES,
    block_count,
    combined_digest,
    digest_of_sums,
    keys,
    tensor_digests,
    tensor_sums,
)
from cosmos_actor.weight_plane.flat_layout import FlatLayout, arranged

log = logging.getLogger(__name__)

CHUNK_BLOCKS = {"cpu": 16, "cuda": 512}
"""Blocks summed at a time. Products take eight bytes a word, which for 32 MiB stays in a large GPU's cache, and the
launches cost little beside it."""
WORD_BYTES = 4
SCRATCH_BYTES = 1 << 30
"""Into which tensors are packed for their digests, unless one alone is larger: a model needs no room for a second."""
TRIAL_BLOCKS = 7
"""Of the comparison of a kernel with torch: not a multiple of what one program of it sums."""

SumBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""See `device_kernel.sum_blocks`."""
SumScattered = Callable[[tuple[tuple[int, int], ...], torch.Tensor, torch.Tensor], None]
"""See `device_kernel.sum_scattered`."""
KERNEL_ALIGNED_BYTES = 16
"""Where a tensor must begin and end for it."""


def tensor_digest_on(tensor: torch.Tensor) -> bytes:
    """What `tensor_digest` gives for the same tensor on the host."""
    return digest_of_sums(dtype_name(tensor), tensor.shape, block_sums_on(tensor).cpu().numpy())


def weights_digest_on(tensors: Mapping[str, torch.Tensor]) -> str:
    """What `weights_digest` gives for the same tensors."""
    return combined_digest(tensor_digests_on(tensors))


def tensor_digests_on(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Name -> `tensor_digest`. What is on the host is computed there, by numpy; on a device, a pass for all tensors,
    where they lie, or packed into one buffer for it."""
    found = tensor_digests({name: array_of(one) for name, one in tensors.items() if one.device.type == "cpu"})
    elsewhere: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, one in tensors.items():
        if name not in found:
            elsewhere.setdefault(one.device, {})[name] = one.detach()
    for device, members in elsewhere.items():
        kernel = scattered_kernel_of(device)
        well = {} if kernel is None else {name: one for name, one in members.items() if _lies_well(one)}
        rest = {name: one for name, one in members.items() if name not in well}
        if kernel is not None and well:
            found.update(_where_they_lie(well, kernel))
        if rest:
            found.update(tensor_digests_packed(rest, device))
    return {name: found[name] for name in tensors}


def tensor_digests_packed(
    tensors: Mapping[str, torch.Tensor], device: torch.device, scratch_bytes: int = SCRATCH_BYTES
) -> dict[str, bytes]:
    """Name -> `tensor_digest` of tensors on one device. They are copied into one buffer of at most `scratch_bytes`, or
    of the largest of them, over and over; one that is alone is read where it is."""
    if len(tensors) == 1:
        [(name, one)] = tensors.items()
        return {name: tensor_digest_on(one)}
    layout = arranged({name: (dtype_name(one), tuple(one.shape)) for name, one in tensors.items()}, scratch_bytes)
    scratch = torch.zeros(max(layout.buckets), dtype=torch.uint8, device=device)
    sums = []
    for number, size in enumerate(layout.buckets):
        if number:
            scratch.zero_()
        names = [name for name in layout.contents if layout.places[name].bucket == number]
        copy_all([_view(scratch, layout, name, tensors[name].dtype) for name in names], [tensors[n] for n in names])
        sums.append(block_sums_on(scratch[:size]))
    return digests_of_sums(layout, sums_on_host(sums))


def _lies_well(tensor: torch.Tensor) -> bool:
    return (tensor.numel() > 0 and tensor.is_contiguous() and tensor.data_ptr() % KERNEL_ALIGNED_BYTES == 0
            and tensor.nbytes % KERNEL_ALIGNED_BYTES == 0)


def _where_they_lie(tensors: Mapping[str, torch.Tensor], kernel: SumScattered) -> dict[str, bytes]:
    """Name -> `tensor_digest` of tensors of one device that lie well for the kernel."""
    ends = np.cumsum([block_count(one.nbytes) for one in tensors.values()])
    device = next(iter(tensors.values())).device
    sums = torch.empty((int(ends[-1]), LANES), dtype=torch.int64, device=device)
    kernel(tuple(map(_place, tensors.values())), _keys(device), sums)
    parts = np.split(sums.cpu().numpy(), ends[:-1])
    return {name: digest_of_sums(dtype_name(one), one.shape, part)
            for (name, one), part in zip(tensors.items(), parts, strict=True)}


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Its address, and how many words it has."""
    return tensor.data_ptr(), tensor.nbytes // WORD_BYTES


def buffer_sums(buffers: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """[blocks, LANES] int64 of each buffer ([nbytes] uint8), on the host, to which they come in one copy."""
    if buffers[0].device.type == "cpu":
        found = tensor_sums({str(number): buffer.numpy() for number, buffer in enumerate(buffers)})
        return [found[str(number)] for number in range(len(buffers))]
    return sums_on_host([block_sums_on(buffer) for buffer in buffers])


def digests_of_sums(layout: FlatLayout, sums: Sequence[np.ndarray]) -> dict[str, bytes]:
    """Name -> `tensor_digest`. sums: [blocks, LANES] of each bucket."""
    return {name: digest_of_sums(dtype, shape, sums[layout.places[name].bucket][layout.places[name].blocks])
            for name, (dtype, shape) in layout.contents.items()}


@torch.no_grad()
def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of `sources` into its target, cast where dtypes differ: hundreds of small tensors in a few launches."""
    alike: dict[tuple[object, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.numel():
            group = alike.setdefault((target.dtype, target.device, source.dtype, source.device), ([], []))
            group[0].append(target)
            group[1].append(source)
    for into, out_of in alike.values():
        torch._foreach_copy_(into, out_of)


def block_sums_on(tensor: torch.Tensor) -> torch.Tensor:
    """[blocks, LANES] int64 on the tensor's device: `block_sums` of its bytes."""
    words = _words(tensor.detach())
    made = torch.zeros((-(-len(words) // BLOCK_WORDS), LANES), dtype=torch.int64, device=tensor.device)
    whole = len(words) // BLOCK_WORDS
    if whole:
        (kernel_of(tensor.device) or sum_eagerly)(words[: whole * BLOCK_WORDS].view(whole, BLOCK_WORDS),
                                                   _keys(tensor.device), made[:whole])
    rest = words[whole * BLOCK_WORDS :]
    if len(rest):
        made[whole] = (rest * _keys(tensor.device)[:, : len(rest)]).sum(1)
    return made


def sum_eagerly(words: torch.Tensor, lanes: torch.Tensor, sums: torch.Tensor) -> None:
    """See `device_kernel.sum_blocks`; on every device."""
    step = CHUNK_BLOCKS.get(words.device.type, CHUNK_BLOCKS["cuda"])
    for begin in range(0, len(words), step):
        for lane in range(LANES):
            sums[begin : begin + step, lane] = (words[begin : begin + step] * lanes[lane]).sum(1)


@lru_cache(maxsize=16)
def kernel_of(device: torch.device) -> SumBlocks | None:
    """Triton's kernel, if it works on `device`; None: torch's operations do."""
    return _tried("sum_blocks", agrees, device)


@lru_cache(maxsize=16)
def scattered_kernel_of(device: torch.device) -> SumScattered | None:
    """The same for tensors that lie anywhere; None: they are packed."""
    return _tried("sum_scattered", agrees_where_they_lie, device)


def _tried(name: str, agrees: Callable[[Any, torch.device], bool], device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    try:
        from cosmos_actor.weight_plane import device_kernel

        kernel = getattr(device_kernel, name)
        if agrees(kernel, device):
            return kernel
        log.warning("the kernel %s for digests finds other sums than torch on %s: it is not used", name, device)
    except Exception as error:  # of any kind: no triton, no compiler, a GPU that it does not know
        log.info("digests are computed by torch's own operations on %s: %s: %s", device, type(error).__name__, error)
    return None


def agrees(sum_blocks: SumBlocks, device: torch.device) -> bool:
    """Whether it finds the sums that torch finds, for words of every size and sign."""
    words = _trial_words(device)
    expected, found = (torch.zeros((TRIAL_BLOCKS, LANES), dtype=torch.int64, device=device) for _ in range(2))
    sum_eagerly(words, _keys(device), expected)
    sum_blocks(words, _keys(device), found)
    return torch.equal(expected, found)


def agrees_where_they_lie(sum_scattered: SumScattered, device: torch.device) -> bool:
    """The same, for tensors that begin and end anywhere in a block."""
    words = _trial_words(device).reshape(-1)
    tensors = [words, words[BLOCK_WORDS + 8 :], words[4 : 4 + 2 * BLOCK_WORDS], words[8:BLOCK_WORDS], words[:4]]
    expected = torch.cat([block_sums_on(one) for one in tensors])
    found = torch.full_like(expected, -1)
    sum_scattered(tuple(map(_place, tensors)), _keys(device), found)
    return torch.equal(expected, found)


def _trial_words(device: torch.device) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(0)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (TRIAL_BLOCKS, BLOCK_WORDS), generator=drawn, dtype=torch.int64)
    words = words.to(torch.int32)
    words[0], words[1, ::2], words[1, 1::2] = 0, -(1 << 31), (1 << 31) - 1
    return words.to(device)


def dtype_name(tensor: torch.Tensor) -> str:
    """The name that the digest has for the tensor's dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    return "bfloat16" if name == "uint16" else name


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """A tensor that is on the host, in the same memory if it is contiguous there; bfloat16 as uint16."""
    plain = tensor.detach().contiguous()
    return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(keys().copy()).to(device)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """[words] int32 of the tensor's bytes, filled up with zeros; a view where that is possible."""
    if not tensor.numel():
        return torch.zeros(0, dtype=torch.int32, device=tensor.device)
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    missing = -len(flat) % WORD_BYTES
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    elif flat.storage_offset() % WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int32)


def sums_on_host(sums: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """All of one device in one copy and one wait."""
    host = torch.cat(list(sums)).cpu().numpy()
    return np.split(host, np.cumsum([len(one) for one in sums])[:-1])


def _view(buffer: torch.Tensor, layout: FlatLayout, name: str, dtype: torch.dtype) -> torch.Tensor:
    place = layout.places[name]
    return buffer[place.offset : place.offset + place.nbytes].view(dtype).view(layout.contents[name][1])
