"""Tensors that wait on the host while somebody else has their device.

    park    bytes -> host buffers, storages emptied, cached memory given back to the driver
    unpark  storages as large as before, bytes <- host buffers

It works on storages, so whoever holds a tensor (a module, an optimiser, FSDP2, a tied layer) holds the same one after
it. A parked tensor has no memory at all: who could be asked to compute with one refuses by `Parked`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch

SLAB_BYTES = 256 << 20
"""Pinned memory is given out in powers of two: one piece for a whole model could cost twice what is needed."""


LEFT_BYTES = 64 << 20
"""More than this in tensors after all was parked is garbage in cycles, and worth the tenths of a second to find it."""


class Parked(RuntimeError):
    """Asked to compute with what waits on the host: it is not this one's turn on the device."""


class ParkingPlace:
    """Guarantee: after `unpark` each tensor has the bytes that it had before `park`, but for those that were void.

    Host buffers are made once and used again. Storages of a CPU that nobody may empty, since numpy has seen them, are
    put aside whole.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slabs: list[torch.Tensor] = []
        self._parked: list[torch.UntypedStorage] = []
        """In the order in which they lie in the slabs; then the void ones."""
        self._sizes: list[int] = []
        self._void: list[int] = []
        self._known: list[tuple[int, int]] = []
        """(storage, bytes) of the constants whose bytes are on the host already."""
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(tensor, what it was)"""

    @property
    def parked(self) -> bool:
        return bool(self._parked or self._aside)

    def park(self, changing: Iterable[torch.Tensor], constant: Iterable[torch.Tensor] = (),
             void: Iterable[torch.Tensor] = ()) -> int:
        """Free the device memory of all of them; how many bytes that were.

        `constant` are the same whenever they are parked, and cross to the host once. `void` are dropped: `unpark` gives
        them memory with anything in it. A tensor that is in two of them is what it is in first, void before constant
        before changing.
        """
        if self.parked:
            return 0
        seen: dict[int, torch.UntypedStorage] = {}
        dropped, kept, moved = (list(self._storages(tensors, seen)) for tensors in (void, constant, changing))
        self._parked = [*kept, *moved, *dropped]
        self._sizes = [storage.nbytes() for storage in (*kept, *moved)]
        self._void = [storage.nbytes() for storage in dropped]
        self._make_room(sum(self._sizes))
        known = [(storage._cdata, storage.nbytes()) for storage in kept]
        self._cross(to_host=True, first=len(kept) if known == self._known else 0)
        self._known = known
        for storage in self._parked:
            storage.resize_(0)
        for tensor, _ in self._aside:
            tensor.data = tensor.data.new_empty(0)
        give_back(self._device)
        return self._moved() + sum(self._void)

    def unpark(self) -> int:
        """Have them as they were; how many bytes came. Where memory is too short for all, they stay parked and what the
        device says is raised."""
        if not self.parked:
            return 0
        try:
            for storage, size in zip(self._parked, (*self._sizes, *self._void), strict=True):
                storage.resize_(size)
        except Exception:
            for storage in self._parked:
                storage.resize_(0)
            give_back(self._device)
            raise
        self._cross(to_host=False)
        for tensor, whole in self._aside:
            tensor.data = whole
        moved = self._moved()
        self._parked, self._aside = [], []
        return moved

    def _moved(self) -> int:
        return sum(self._sizes) + sum(whole.nbytes for _, whole in self._aside)

    def _storages(self, tensors: Iterable[torch.Tensor], seen: dict[int, torch.UntypedStorage]
                  ) -> Iterator[torch.UntypedStorage]:
        for tensor in tensors:
            own = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own shard
            storage = own.untyped_storage()
            if storage.device.type != self._device.type or not storage.nbytes():
                continue
            if not storage.resizable():
                if not any(own is other for other, _ in self._aside):
                    self._aside.append((own, own.data))
            elif storage._cdata not in seen:
                seen[storage._cdata] = storage
                yield storage

    def _make_room(self, size: int) -> None:
        room = sum(len(slab) for slab in self._slabs)
        while room < size:
            count = min(SLAB_BYTES, size - room)
            self._slabs.append(torch.empty(count, dtype=torch.uint8, pin_memory=self._device.type == "cuda"))
            room += count

    def _cross(self, *, to_host: bool, first: int = 0) -> None:
        """Copy all storages from number `first` on. What they hold is where it should be when this returns."""
        _settle(self._device)
        for number, part, host in self._pieces():
            if number >= first:
                device = torch.empty(0, dtype=torch.uint8, device=self._device).set_(self._parked[number])[part]
                (host if to_host else device).copy_(device if to_host else host, non_blocking=True)
        _settle(self._device)

    def _pieces(self) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """(number of a storage, which of its bytes, their place on the host)."""
        slabs = iter(self._slabs)
        room = torch.empty(0, dtype=torch.uint8)
        for number, size in enumerate(self._sizes):
            done = 0
            while done < size:
                room = room if len(room) else next(slabs)
                count = min(size - done, len(room))
                yield number, slice(done, done + count), room[:count]
                room, done = room[count:], done + count


def give_back(device: torch.device) -> None:
    """What no tensor needs goes back to the driver, for other processes."""
    if device.type == "cuda":
        if torch.cuda.memory_allocated(device) > LEFT_BYTES:
            gc.collect()
        _settle(device)
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()
        torch.cuda.empty_cache()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def begin_measuring(device: torch.device) -> None:
    """Peaks count from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_used(device: torch.device) -> tuple[int, int]:
    """(most bytes that this process has taken for tensors since `begin_measuring`, bytes of the device that are not
    free now, by whomever). Zeros where there is no GPU.

    The allocator keeps what it once took: at the end of a turn, before `give_back`, the second is the turn's peak.
    """
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_reserved(device), total - free
