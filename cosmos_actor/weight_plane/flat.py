"""A version on a device: all its tensors in one buffer, or a few, as `flat_layout` says. Imports torch.

The same on a CPU, where the device's memory is the host's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch

from cosmos_actor.weight_plane.device_digest import buffer_sums, copy_all, digests_of_sums, tensor_digests_on
from cosmos_actor.weight_plane.digest import combined_digest, tensor_digests
from cosmos_actor.weight_plane.flat_layout import FlatLayout

_numbers = count()

Allocate = Callable[[int, torch.device], torch.Tensor]
"""(bytes, device) -> [bytes] uint8, zeros."""


class FlatTensors(dict[str, torch.Tensor]):
    """Name -> view of `flat`. Who uses any of the tensors keeps this: it is what tells that the memory is in use."""

    def __init__(self, flat: Flat, views: Mapping[str, torch.Tensor]) -> None:
        super().__init__(views)
        self.flat = flat


class Flat:
    """Memory for one version. Only its tensors' places are ever written, so that gaps stay zero."""

    def __init__(self, layout: FlatLayout, device: torch.device, allocate: Allocate | None = None) -> None:
        self.layout, self.device = layout, device
        self.number = next(_numbers)
        make = allocate or zeros
        self.buffers = [make(size, device) for size in layout.buckets]
        self._views = {name: self._view(name) for name in layout.contents}

    def tensors(self) -> FlatTensors:
        """In the layout's order; bfloat16 is torch's."""
        return FlatTensors(self, self._views)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy these in, cast to what the layout says. Asked of the device's current stream, not waited for."""
        copy_all([self._views[name] for name in tensors], list(tensors.values()))

    def digests(self) -> dict[str, bytes]:
        """Name -> `tensor_digest` of what lies there now, in one pass over the bytes."""
        return digests_of_sums(self.layout, buffer_sums(self.buffers))

    def runs(self) -> list[torch.Tensor]:
        """All that lies there, gaps and their zeros too: a view for all tensors of one dtype that follow each other."""
        found: list[tuple[str, int, int, int]] = []
        for name, (dtype, _) in self.layout.contents.items():
            bucket, offset, nbytes = self.layout.places[name]
            if found and found[-1][:2] == (dtype, bucket):
                offset = found.pop()[2]
            found.append((dtype, bucket, offset, self.layout.places[name].offset + nbytes))
        return [self.buffers[bucket][begin:end].view(getattr(torch, dtype)) for dtype, bucket, begin, end in found]

    def _view(self, name: str) -> torch.Tensor:
        (dtype, shape), place = self.layout.contents[name], self.layout.places[name]
        payload = self.buffers[place.bucket][place.offset : place.offset + place.nbytes]
        return payload.view(getattr(torch, dtype)).view(shape)


NoDeviceMemory = torch.OutOfMemoryError


def zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def digest_offered(tensors: Mapping[str, Any]) -> str:
    """`weights_digest` of arrays, of torch's tensors on any device, or of a flat, in one pass then."""
    if isinstance(tensors, FlatTensors):
        return combined_digest(tensors.flat.digests())
    arrays = {name: one for name, one in tensors.items() if isinstance(one, np.ndarray)}
    others = {name: one for name, one in tensors.items() if name not in arrays}
    return combined_digest({**tensor_digests(arrays), **tensor_digests_on(others)})


_streams = threading.local()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """What is asked of a GPU inside does not wait for what its default stream computes, and is done at the end.

    Without it a digest, or a broadcast, would begin when the training step that was asked for before it is over.
    """
    if device.type != "cuda":
        yield
        return
    known: dict[str, Any] = _streams.__dict__
    with torch.cuda.device(device):
        stream = known.get(str(device)) or known.setdefault(str(device), torch.cuda.Stream(device, priority=-1))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
