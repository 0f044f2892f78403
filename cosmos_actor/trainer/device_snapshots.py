"""Copies of the weights that no later step touches, on the device that trains: nothing of them comes to the host.

    take(v5) -> flat A, published from there          take(v6) -> flat B meanwhile, pulled from A

The copy is asked of the stream that trains, so that whatever is asked of it next, a step's writes too, comes after it.
The same promises as `snapshots`; the two flats cost two versions of the device's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cosmos_actor.trainer.model_weights import BUCKET_BYTES
from cosmos_actor.weight_plane.device_digest import dtype_name
from cosmos_actor.weight_plane.flat import FlatTensors
from cosmos_actor.weight_plane.flat_pool import FlatPool, Hold


class DeviceSnapshot:
    """The weights at one moment. They stay what they are until `release`, and as long as somebody else holds them."""

    def __init__(self, hold: Hold, copied: Any) -> None:
        self._hold, self._copied = hold, copied

    def arrays(self) -> FlatTensors:
        """Name -> tensor on the device. Waits until the copy is done. From any thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._hold.flat.tensors()

    def release(self) -> None:
        """A second time changes nothing."""
        if self._copied is not None:
            self._copied.synchronize()
        self._hold.release()


class DeviceSnapshots:
    """Guarantee: what a snapshot holds are the weights as they were when `take` was called. One thread takes them."""

    def __init__(self, pool: FlatPool) -> None:
        self.pool = pool
        self._copied: Any = None

    def take(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None,
             whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> DeviceSnapshot:
        """A snapshot with floating point as `dtype`; None: as they are. Sharded tensors are gathered by `whole`.

        Raises NoFreeBuffer, and ManifestInvalid for a dtype that can not travel.
        """
        def kind(tensor: torch.Tensor) -> str:
            cast = dtype is not None and tensor.is_floating_point()
            return dtype_name(tensor) if not cast else str(dtype).removeprefix("torch.")

        hold = self.pool.take({name: (kind(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()})
        try:
            self._copy(tensors, hold, whole)
        except BaseException:
            hold.release()
            raise
        if self.pool.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.pool.device))
        return DeviceSnapshot(hold, self._copied)

    def before_a_write(self) -> None:
        """To be called before a step changes the weights. The host does not wait, only what it asks of the GPU next."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def settle(self) -> None:
        """Wait until nothing is read from the weights any more: they may be freed then."""
        if self._copied is not None:
            self._copied.synchronize()

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, torch.Tensor], hold: Hold,
              whole: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """What is gathered is copied in buckets: as much again is needed on the device meanwhile."""
        gathered: dict[str, torch.Tensor] = {}
        made = 0
        for name, tensor in tensors.items():
            own = tensor.detach()
            gathered[name] = whole(own)
            made += 0 if gathered[name] is own else gathered[name].nbytes
            if made > BUCKET_BYTES:
                hold.flat.fill(gathered)
                gathered, made = {}, 0
        hold.flat.fill(gathered)
