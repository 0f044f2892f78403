"""A model's weights as named numpy arrays, and back again, whole or not at all.

One rule for names on every side: the module's parameters and persistent buffers, each storage once, under its first
name. A tied head therefore travels once, as the embedding. bfloat16 travels as uint16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from cosmos_actor.weight_plane.digest import weights_digest

BUCKET_BYTES = 256 << 20
# As much again is needed on the device while a bucket is gathered.


class WeightsDoNotFit(ValueError):
    """A name, shape or dtype of the weights offered is not the model's; nothing was written."""


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that makes up the weights, by name, in the module's order; shared storage appears once."""
    saved = set(module.state_dict(keep_vars=True).keys())
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
    tensors.update((name, buffer) for name, buffer in module.named_buffers() if name in saved)
    return tensors


def host_copies(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    """A copy of each tensor on the host, which later training steps do not touch.

    Tensors cross from a GPU in buckets: one by one, each would cost a round trip.
    """
    copies: dict[str, np.ndarray] = {}
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and (tensor.dtype != bucket[0][1].dtype or size + tensor.nbytes > BUCKET_BYTES):
            copies.update(_copied(bucket))
            bucket, size = [], 0
        bucket.append((name, tensor.detach()))
        size += tensor.nbytes
    return copies | (_copied(bucket) if bucket else {})


def _copied(bucket: list[tuple[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket]).cpu()
    host = flat.view(torch.uint16).numpy() if flat.dtype == torch.bfloat16 else flat.numpy()
    ends = np.cumsum([tensor.numel() for _, tensor in bucket])
    parts = np.split(host, ends[:-1])
    return {name: part.reshape(tuple(tensor.shape)) for (name, tensor), part in zip(bucket, parts, strict=True)}


def weights_digest_of(module: torch.nn.Module) -> str:
    """The digest of the tensors that the module computes with."""
    return weights_digest(host_copies(named_tensors(module).items()))


def load_whole(module: torch.nn.Module, tensors: Mapping[str, np.ndarray]) -> None:
    """Copy `tensors` into the module. Raises WeightsDoNotFit, before anything is written, if any does not fit."""
    own = named_tensors(module)
    _check_names(set(own), set(tensors))
    ready = {name: _fitting(name, own[name], array) for name, array in tensors.items()}
    with torch.no_grad():
        for name, tensor in ready.items():
            own[name].copy_(tensor)


def _check_names(own: set[str], offered: set[str]) -> None:
    missing, unknown = sorted(own - offered), sorted(offered - own)
    if missing or unknown:
        parts = [f"missing {', '.join(missing[:3])}"] if missing else []
        parts += [f"unknown {', '.join(unknown[:3])}"] if unknown else []
        raise WeightsDoNotFit(f"weights do not fit the model: {'; '.join(parts)} ({len(missing) + len(unknown)} names)")


def _fitting(name: str, own: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    if tuple(array.shape) != tuple(own.shape):
        raise WeightsDoNotFit(f"weights do not fit the model: {name} is {list(own.shape)}, not {list(array.shape)}")
    source = np.array(array) if not array.flags.writeable else array
    tensor = torch.from_numpy(np.ascontiguousarray(source))
    if own.dtype == torch.bfloat16 and tensor.dtype == torch.uint16:
        tensor = tensor.view(torch.bfloat16)
    if tensor.dtype != own.dtype:
        raise WeightsDoNotFit(f"weights do not fit the model: {name} is {own.dtype}, not {tensor.dtype}")
    return tensor
