"""A model's weights as named numpy arrays, and back again, whole or not at all.

One rule for names on every side: the module's parameters and persistent buffers, each storage once, under its first
name. A tied head therefore travels once, as the embedding. bfloat16 travels as uint16.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from cosmos_actor.weight_plane.digest import weights_digest


class WeightsDoNotFit(ValueError):
    """A name, shape or dtype of the weights offered is not the model's; nothing was written."""


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that makes up the weights, by name, in the module's order; shared storage appears once."""
    saved = set(module.state_dict(keep_vars=True).keys())
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
    tensors.update((name, buffer) for name, buffer in module.named_buffers() if name in saved)
    return tensors


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A host copy that later training steps do not touch."""
    host = tensor.detach().to("cpu", copy=True).contiguous()
    return host.view(torch.uint16).numpy() if host.dtype == torch.bfloat16 else host.numpy()


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A view where the tensor is on the host, a copy where it is not."""
    host = tensor.detach().cpu().contiguous()
    return host.view(torch.uint16).numpy() if host.dtype == torch.bfloat16 else host.numpy()


def weights_digest_of(module: torch.nn.Module) -> str:
    """The digest of the tensors that the module computes with."""
    return weights_digest({name: as_numpy(tensor) for name, tensor in named_tensors(module).items()})


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
