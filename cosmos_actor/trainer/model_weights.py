"""A model's weights as named arrays, and back again, whole or not at all. What comes back may be torch's, anywhere.

One rule for names on every side: the module's parameters and persistent buffers, each storage once, under its first
name. A tied head therefore travels once, as the embedding. bfloat16 travels as uint16. Of a model with an adapter the
weights are the adapter's, and the digest of its base; see `adapter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from cosmos_actor.trainer.adapter import BASE_DIGEST, adapter_tensors, is_adapted
from cosmos_actor.trainer.models import saved_buffers
from cosmos_actor.weight_plane.device_digest import array_of, copy_all, weights_digest_on
from cosmos_actor.weight_plane.flat import FlatTensors

BUCKET_BYTES = 256 << 20
# As much again is needed on the device while a bucket is gathered.
Name = TypeVar("Name", str, int)
NAMES_SHOWN = 10
# Of those that do not fit: a model has hundreds, and the first few say which one it is.


class WeightsDoNotFit(ValueError):
    """A name, shape or dtype of the weights offered is not the model's, or a number not finite; nothing was written."""


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that makes up the weights, by name, in the module's order; shared storage appears once."""
    if is_adapted(module):
        return adapter_tensors(module)
    return {**dict(module.named_parameters()), **saved_buffers(module)}


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
    ends = np.cumsum([tensor.numel() for _, tensor in bucket])
    parts = np.split(array_of(flat), ends[:-1])
    return {name: part.reshape(tuple(tensor.shape)) for (name, tensor), part in zip(bucket, parts, strict=True)}


def weights_digest_of(module: torch.nn.Module) -> str:
    """The digest of the tensors that the module computes with, computed where they are."""
    return weights_digest_on(named_tensors(module))


def load_whole(module: torch.nn.Module, tensors: Mapping[str, Any]) -> None:
    """Copy `tensors` into the module. Raises WeightsDoNotFit, before anything is written, if any does not fit."""
    own = named_tensors(module)
    ready = fitting(own, tensors)
    copy_all([own[name] for name in ready], list(ready.values()))


def fitting(own: Mapping[str, torch.Tensor], tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """`tensors`, arrays or torch's on any device, as `own`'s kind, by name; none of these is moved or copied, and a
    flat's stay its. own: a module's, which may be on the meta device. Raises WeightsDoNotFit, also for numbers that are
    not finite: float16, for one, ends at 65504."""
    _check_names(set(own), set(tensors))
    offered = {name: _as_tensor(array, own[name].dtype) for name, array in tensors.items()}
    _check_kinds(own, offered)
    if BASE_DIGEST in offered and not torch.equal(offered[BASE_DIGEST].cpu(), own[BASE_DIGEST].cpu()):
        theirs, ours = (bytes(digest.cpu().numpy()).hex()[:16] for digest in (offered[BASE_DIGEST], own[BASE_DIGEST]))
        raise WeightsDoNotFit(f"the adapter is for a base with digest {theirs}, the base here has {ours}: policy.model "
                              "is not the same files everywhere")
    offered = FlatTensors(tensors.flat, offered) if isinstance(tensors, FlatTensors) else offered
    wrong = first_not_finite(offered)
    if wrong:
        raise WeightsDoNotFit(f"{wrong} has numbers that are not finite")
    return offered


def _check_names(own: set[str], offered: set[str]) -> None:
    missing, unknown = sorted(own - offered), sorted(offered - own)
    if missing or unknown:
        parts = [f"missing {', '.join(missing[:NAMES_SHOWN])}"] if missing else []
        parts += [f"unknown {', '.join(unknown[:NAMES_SHOWN])}"] if unknown else []
        raise WeightsDoNotFit(f"weights do not fit the model (policy.model): {'; '.join(parts)} "
                              f"({len(missing) + len(unknown)} names)")


def _check_kinds(own: Mapping[str, torch.Tensor], offered: Mapping[str, torch.Tensor]) -> None:
    """Raises WeightsDoNotFit with the first of those whose shape or, where all shapes fit, dtype is another."""
    shapes = [f"{name} is {list(own[name].shape)}, not {list(tensor.shape)}"
              for name, tensor in offered.items() if own[name].shape != tensor.shape]
    dtypes = [f"{name} is {own[name].dtype}, not {tensor.dtype}"
              for name, tensor in offered.items() if own[name].dtype != tensor.dtype]
    for setting, differences in (("policy.model", shapes), ("policy.publish_dtype", dtypes)):
        if differences:
            raise WeightsDoNotFit(f"weights do not fit the model ({setting}): {'; '.join(differences[:NAMES_SHOWN])} "
                                  f"({len(differences)} of {len(offered)} tensors)")


def _as_tensor(array: np.ndarray | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As a tensor, uint16 as bfloat16 where that is what the model has."""
    if isinstance(array, torch.Tensor):
        tensor = array.detach()
    else:
        source = np.array(array) if not array.flags.writeable else array
        tensor = torch.from_numpy(np.ascontiguousarray(source)).reshape(array.shape)
    return tensor.view(torch.bfloat16) if (dtype, tensor.dtype) == (torch.bfloat16, torch.uint16) else tensor


def first_not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """The first of `tensors` with a number that is not finite; empty: there is none. A device is waited for once."""
    if isinstance(tensors, FlatTensors) and not _not_finite(dict(enumerate(tensors.flat.runs()))):
        return ""
    return next(iter(_not_finite(tensors)), "")


def _not_finite(tensors: Mapping[Name, torch.Tensor]) -> list[Name]:
    """Whose numbers are not all finite, in order."""
    floats = {name: one for name, one in tensors.items() if one.is_floating_point() and one.numel()}
    # The least and the largest tell, at a tenth of the time of looking at each.
    ends = [torch.stack(torch.aminmax(one)).isfinite().all() for one in floats.values()]
    devices: dict[torch.device, list[int]] = {}
    for number, end in enumerate(ends):
        devices.setdefault(end.device, []).append(number)
    wrong = {number for numbers in devices.values()
             for number, right in zip(numbers, torch.stack([ends[number] for number in numbers]).tolist(), strict=True)
             if not right}
    return [name for number, name in enumerate(floats) if number in wrong]
