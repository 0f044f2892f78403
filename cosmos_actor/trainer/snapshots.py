"""Copies of the weights that no later step touches, in two host buffers that are used again and again.

    take(v5) -> buffer A, read by whoever publishes          take(v6) -> buffer B meanwhile

On a CPU a snapshot is a copy in memory. From a GPU it is copied on a stream of its own into pinned memory while the
next step computes; only what writes weights waits for it (`before_a_write`), and who reads the arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from cosmos_actor.trainer.model_weights import BUCKET_BYTES
from cosmos_actor.weight_plane.device_digest import array_of
from cosmos_actor.weight_plane.flat_pool import BUFFERS, NoFreeBuffer
from cosmos_actor.weight_plane.manifest import ALIGNMENT_BYTES


class Snapshot:
    """The weights at one moment. They stay what they are until `release`; afterwards nobody may look at them."""

    def __init__(self, arrays: dict[str, np.ndarray], copied: Any, release: Callable[[], None]) -> None:
        self._arrays, self._copied, self._release = arrays, copied, release

    def arrays(self) -> Mapping[str, np.ndarray]:
        """Name -> tensor, bfloat16 as uint16. Waits until the copies from a GPU are done. From any thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._arrays

    def release(self) -> None:
        """The buffer may be written again. A second time changes nothing."""
        release, self._release = self._release, _nothing
        self.arrays()  # Copies that are under way still write to it.
        release()


class Snapshots:
    """Guarantee: what a snapshot holds are the weights as they were when `take` was called. One thread takes them."""

    def __init__(self) -> None:
        self._free: list[_HostBuffer] = [_HostBuffer() for _ in range(BUFFERS)]
        self._lock = threading.Lock()
        self._stream: Any = None
        self._copied: Any = None

    def take(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None,
             whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Snapshot:
        """A snapshot with floating point as `dtype`; None: as they are. Sharded tensors are gathered by `whole`.

        Raises NoFreeBuffer.
        """
        with self._lock:
            if not self._free:
                raise NoFreeBuffer(f"all {BUFFERS} snapshots are in use")
            buffer = self._free.pop()
        try:
            buffer.fit({name: (tuple(tensor.shape), _kept(tensor.dtype, dtype)) for name, tensor in tensors.items()},
                       pinned=any(tensor.device.type == "cuda" for tensor in tensors.values()))
            self._copy(tensors, buffer, whole)
        except BaseException:
            self._give_back(buffer)
            raise
        return Snapshot(buffer.arrays, self._copied, lambda: self._give_back(buffer))

    def before_a_write(self) -> None:
        """To be called before a step changes the weights. The host does not wait, only what it asks of the GPU next."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def settle(self) -> None:
        """Wait until nothing is read from the weights any more: they may be freed then."""
        if self._copied is not None:
            self._copied.synchronize()

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, torch.Tensor], buffer: _HostBuffer,
              whole: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Weights that are all on the host are copied when this returns."""
        under_way, copied = 0, None
        for name, tensor in tensors.items():
            own = tensor.detach()
            gathered = whole(own)
            if gathered.device.type != "cuda":
                buffer.views[name].copy_(gathered)
                continue
            copied = self._copied = copied or torch.cuda.Event()
            self._from_gpu(gathered, buffer.views[name])
            under_way += 0 if gathered is own else gathered.nbytes
            if under_way > BUCKET_BYTES:  # What was gathered for this is freed only when it is copied.
                self.settle()
                under_way = 0

    def _from_gpu(self, tensor: torch.Tensor, view: torch.Tensor) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            view.copy_(tensor.to(view.dtype), non_blocking=True)
            self._copied.record(self._stream)
        tensor.record_stream(self._stream)

    def _give_back(self, buffer: _HostBuffer) -> None:
        with self._lock:
            self._free.append(buffer)


class _HostBuffer:
    """Memory for one whole version, made anew only when names, shapes or dtypes change."""

    def __init__(self) -> None:
        self._contents: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.views: dict[str, torch.Tensor] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def fit(self, contents: dict[str, tuple[tuple[int, ...], torch.dtype]], *, pinned: bool) -> None:
        if contents == self._contents:
            return
        places, end = {}, 0
        for name, (shape, dtype) in contents.items():
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            places[name] = (end, end + size)
            end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        memory = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        self.views = {name: memory[slice(*places[name])].view(dtype).view(shape)
                      for name, (shape, dtype) in contents.items()}
        self.arrays = {name: array_of(view) for name, view in self.views.items()}
        self._contents = contents


def _kept(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _nothing() -> None:
    """Released already."""
