"""What every engine does when weights are offered to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from cosmos_actor.roles.engine import HeldWeights, StaleWeights, WeightsRefused, WeightsSpoiled
from cosmos_actor.trainer.model_weights import WeightsDoNotFit, fitting, named_tensors, weights_digest_of
from cosmos_actor.weight_plane.device_digest import copy_all
from cosmos_actor.weight_plane.flat import FlatTensors, digest_offered

Name = TypeVar("Name", str, int)


def load_newer(model: torch.nn.Module, held: HeldWeights, tensors: Mapping[str, Any], version: int,
               digest: str) -> HeldWeights:
    """Copy all of `tensors` into `model` and say what it then holds, by the digest of its own tensors.

    All of them are checked against `digest`, where they lie, before the first is copied. Raises StaleWeights,
    WeightsSpoiled or WeightsRefused; the model is then as before.
    """
    check_offer(held, tensors, version, digest)
    own = named_tensors(model)
    ready = usable(own, tensors, version)
    copy_all([own[name] for name in ready], list(ready.values()))
    return HeldWeights(version, weights_digest_of(model))


def check_offer(held: HeldWeights, tensors: Mapping[str, Any], version: int, digest: str) -> None:
    """Raises StaleWeights unless `version` is newer than what is held, WeightsSpoiled unless `digest` is theirs."""
    if version <= held.version:
        raise StaleWeights(f"version {version} is not newer than {held.version}, which this engine holds")
    offered = digest_offered(tensors)
    if offered != digest:
        raise WeightsSpoiled(f"version {version} has digest {offered[:16]}, its manifest says {digest[:16]}")


def usable(own: Mapping[str, torch.Tensor], tensors: Mapping[str, Any], version: int) -> dict[str, torch.Tensor]:
    """`fitting`, with finite numbers only. Raises WeightsRefused: float16, for one, ends at 65504."""
    try:
        offered = fitting(own, tensors)
    except WeightsDoNotFit as error:
        raise WeightsRefused(f"version {version}: {error}") from error
    wrong = first_not_finite(offered)
    if wrong:
        raise WeightsRefused(f"version {version}: {wrong} has numbers that are not finite")
    return offered


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
