"""What changed between two versions on a device, found there: only changed elements come to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from cosmos_actor.weight_plane.delta import UNITS, Changes, Layout, in_spans

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""torch compares and gathers these on every device; unsigned ones it hardly knows."""


def changes_on(old: torch.Tensor, new: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(positions [n] int64 ascending, differences [n]) in units of the tensors (see `delta`), on the host."""
    size = min(new.element_size(), 4)
    before, now = _units(old, size), _units(new, size)
    positions = torch.nonzero(before != now)[:, 0]
    differences = now[positions] - before[positions]
    return positions.cpu().numpy(), differences.cpu().numpy().view(UNITS[size])


def parts_on(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> Iterator[Changes]:
    """What changed in all tensors, ready for `delta.compress`. Both have the same names and shapes."""
    layout = Layout({name: (tensor.nbytes, tensor.element_size()) for name, tensor in new.items()})
    found = []
    for name, place in layout.places.items():
        found.append(Changes(place.unit, place.block, *changes_on(old[name], new[name])))
    yield from in_spans(found)


def _units(tensor: torch.Tensor, size: int) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return torch.zeros(0, dtype=SIGNED[size], device=flat.device)
    return flat.view(torch.uint8 if flat.dtype == torch.bool else flat.dtype).view(SIGNED[size])
