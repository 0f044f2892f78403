"""The seam: what every transport promises, and what each can reach at which cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.weight_plane.errors import WeightError

if TYPE_CHECKING:
    import torch


class TransportRefused(WeightError):
    """The transport that was asked for can not serve these two ends; nothing was fetched."""


class TransportLost(WeightError):
    """The other end of a transport went away or fell silent; nothing that came from it was used."""


class Transport(Protocol):
    """Fetches a bucket whole, or raises a BusError within the deadline; never half of one, never a wait without end.

    Whether the bytes are those of the manifest is the subscriber's to verify. Its digests find accidents; whether
    somebody may have changed them on purpose is the transport's, and written down in docs/transports.md.
    """

    async def fetch(self, ref: BulkRef, *, deadline_s: float, silent_s: float | None = None) -> np.ndarray:
        """The array, read-only; `silent_s` is how long nothing may come, for whoever has another source.

        Raises BulkGone, BulkCorrupt, TransportLost or DeadlineExceeded.
        """
        ...

    def check(self, ref: BulkRef) -> None:
        """Raises BulkGone if what `fetch` gave may have changed since."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Counts since the start."""
        ...

    def close(self) -> None:
        """End what runs; who waits is told. Returns within seconds."""
        ...


class DeviceTransport(Protocol):
    """Fetches a bucket into memory of the reader's device, and past the hosts; the same promises."""

    device: torch.device

    async def fetch_into(self, ref: BulkRef, target: torch.Tensor, *, deadline_s: float) -> None:
        """Fill `target` ([nbytes] uint8), or raise what `Transport.fetch` does; then it may be written to until the
        other end is given up, and is not to be used again."""
        ...

    async def lives(self, ref: BulkRef, *, deadline_s: float) -> None:
        """Raises BulkGone if what `fetch_into` copied may have been freed meanwhile."""
        ...


@dataclass(frozen=True)
class Kind:
    """One way for bytes: between which ends, and what it costs."""

    reaches: str
    needs: str
    cost: str


KINDS = {
    "shm": Kind("processes of one host that see each other's /proc", "nothing", "no copy: the publisher's own memory"),
    "stream": Kind("any host that the publisher's port is open to", "nothing",
                   "one copy a side; encrypted (CURVE), or with a keyed digest a chunk, or plain: weights.protection"),
    "directory": Kind("whoever sees the same directory, this job or another, now or later",
                      "weights.directory; fsspec for what is no file:// path", "written once, read once, both in full"),
    "cuda_ipc": Kind("two processes on one GPU", "torch with CUDA at both ends",
                     "one copy within the GPU, out of the publisher's memory, which is mapped once"),
    "nccl": Kind("two GPUs, of one host or of two", "torch with CUDA at both ends",
                 "GPU to GPU; about a second for the group, once; nobody on that network may be hostile"),
}
"""By the name in `weights.transport`."""
TO_GPUS = ("cuda_ipc", "nccl")
"""Those that bring a version from one GPU's memory into a GPU's, without the host."""
