"""`tensor_digest` of a torch tensor, computed on its device: 16 bytes a block come to the host, and no weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch

from cosmos_actor.weight_plane.digest import (
    BLOCK_WORDS,
    LANES,
    combined_digest,
    digest_of_sums,
    keys,
    tensor_digests,
)

CHUNK_BLOCKS = {"cpu": 16, "cuda": 512}
"""Blocks summed at a time. Products take eight bytes a word, which for 32 MiB stays in a large GPU's cache, and the
launches cost little beside it."""
WORD_BYTES = 4


def tensor_digest_on(tensor: torch.Tensor) -> bytes:
    """What `tensor_digest` gives for the same tensor on the host."""
    return digest_of_sums(dtype_name(tensor), tensor.shape, block_sums_on(tensor).cpu().numpy())


def weights_digest_on(tensors: Mapping[str, torch.Tensor]) -> str:
    """What `weights_digest` gives for the same tensors."""
    return combined_digest(tensor_digests_on(tensors))


def tensor_digests_on(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Name -> `tensor_digest`. What is on the host is computed there, by numpy; for a device the host waits once."""
    found = tensor_digests({name: array_of(one) for name, one in tensors.items() if one.device.type == "cpu"})
    elsewhere = {name: one for name, one in tensors.items() if name not in found}
    sums = _to_host([block_sums_on(one) for one in elsewhere.values()])
    found.update((name, digest_of_sums(dtype_name(one), one.shape, host))
                 for (name, one), host in zip(elsewhere.items(), sums, strict=True))
    return {name: found[name] for name in tensors}


def block_sums_on(tensor: torch.Tensor) -> torch.Tensor:
    """[blocks, LANES] int64 on the tensor's device: `block_sums` of its bytes."""
    words = _words(tensor.detach())
    made = torch.zeros((-(-len(words) // BLOCK_WORDS), LANES), dtype=torch.int64, device=tensor.device)
    whole = len(words) // BLOCK_WORDS
    rows = words[: whole * BLOCK_WORDS].view(whole, BLOCK_WORDS)
    lanes = _keys(tensor.device)
    step = CHUNK_BLOCKS.get(tensor.device.type, CHUNK_BLOCKS["cuda"])
    for begin in range(0, whole, step):
        for lane in range(LANES):
            made[begin : min(begin + step, whole), lane] = (rows[begin : begin + step] * lanes[lane]).sum(1)
    rest = words[whole * BLOCK_WORDS :]
    if len(rest):
        made[whole] = (rest * lanes[:, : len(rest)]).sum(1)
    return made


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


def _to_host(sums: list[torch.Tensor]) -> list[np.ndarray]:
    """All sums in one copy a device and one wait each."""
    by_device: dict[torch.device, list[int]] = {}
    for number, one in enumerate(sums):
        by_device.setdefault(one.device, []).append(number)
    found: dict[int, np.ndarray] = {}
    for numbers in by_device.values():
        host = torch.cat([sums[number] for number in numbers]).cpu().numpy()
        ends = np.cumsum([len(sums[number]) for number in numbers])[:-1]
        found.update(zip(numbers, np.split(host, ends), strict=True))
    return [found[number] for number in range(len(sums))]
