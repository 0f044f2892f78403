"""Handles of memory: what one process says so that another maps it. Of a GPU's, by CUDA IPC; imports torch.

    ["cuda", handle, bytes, offset, ...]     what torch's own `_share_cuda_` says, and `_new_shared_cuda` is told
    ["host", pid, descriptor, bytes]         the variant for tests, where the device is a CPU: shared memory of the host
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import torch

from cosmos_actor.bus.errors import CorruptFrame
from cosmos_actor.weight_plane.flat import aside, zeros

CUDA, HOST = "cuda", "host"
CUDA_PARTS = 7
"""Of torch's tuple, behind the number of the GPU, which is another in each process."""

_descriptors: dict[int, int] = {}
"""Address -> descriptor of the memory that `shareable` made on the host."""


def shareable(nbytes: int, device: torch.device) -> torch.Tensor:
    """[nbytes] uint8 zeros that `export` can give away: plain memory of a GPU, a memfd on the host."""
    if device.type == "cuda":
        return zeros(nbytes, device)
    descriptor = os.memfd_create("weights")
    os.ftruncate(descriptor, nbytes)
    tensor = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    _descriptors[tensor.data_ptr()] = descriptor
    weakref.finalize(tensor, _forget, tensor.data_ptr())
    return tensor


def export(buffer: torch.Tensor) -> list[Any]:
    """The handle of a buffer of `shareable`, for one process to open. It lives as long as the buffer does."""
    if buffer.device.type != "cuda":
        return [HOST, os.getpid(), _descriptors[buffer.data_ptr()], buffer.nbytes]
    with aside(buffer.device):
        # The opener's copies wait for what this stream was asked before, so not for a training step.
        return [CUDA, *buffer.untyped_storage()._share_cuda_()[1:]]


def opened(handle: Any, device: torch.device) -> torch.Tensor:
    """[nbytes] uint8 of the other process's memory, mapped until the tensor is dropped. To be called `aside`.

    Raises CorruptFrame for what is no handle, OSError or RuntimeError when the memory is not to be had.
    """
    kind, *parts = handle if isinstance(handle, list) and handle else [None]
    if kind == HOST and len(parts) == 3 and all(isinstance(part, int) for part in parts):
        return _opened_on_host(*parts)
    if kind != CUDA or len(parts) != CUDA_PARTS:
        raise CorruptFrame(f"this is no handle of memory: {kind}", channel="weights")
    number = device.index if device.index is not None else torch.cuda.current_device()
    storage = torch.UntypedStorage._new_shared_cuda(number, *parts)
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", number)).set_(storage)


def _opened_on_host(pid: int, descriptor: int, nbytes: int) -> torch.Tensor:
    with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
        if os.fstat(file.fileno()).st_size != nbytes:
            raise CorruptFrame(f"the memory behind the handle has not {nbytes} bytes", channel="weights")
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)


def _forget(address: int) -> None:
    os.close(_descriptors.pop(address))
