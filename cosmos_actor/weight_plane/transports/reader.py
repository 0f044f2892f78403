"""What a subscriber reads with: chooses a transport for each publisher, once, says which and why, and uses it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.errors import BusError
from cosmos_actor.bus.identity import host_id
from cosmos_actor.weight_plane.transports.choice import RAW, Choice, End, Topology, choose
from cosmos_actor.weight_plane.transports.interface import TO_GPUS, DeviceTransport
from cosmos_actor.weight_plane.transports.raw_client import RawClient
from cosmos_actor.weight_plane.transports.raw_socket import device_of

log = logging.getLogger(__name__)


class BulkReader(Protocol):
    """What this needs of the bulk plane's reader: the transports `shm` and `stream` over ZeroMQ are its own."""

    settings: BulkSettings

    async def fetch(self, ref: BulkRef, *, deadline_s: float, silent_s: float | None = None) -> np.ndarray: ...

    def to_device(self, ref: BulkRef) -> DeviceTransport | None:
        """What brings this bucket to the GPU of this process; None: it comes through the host's memory."""
        return self._device_transport(self._choice(ref).transport)

    def is_local(self, ref: BulkRef) -> bool: ...

    def check(self, ref: BulkRef) -> None: ...

    def statistics(self) -> dict[str, Any]: ...


class TransportReader:
    """A `Reader` of buckets: whole or an error, each within its deadline, by the transport that `choose` names.

    The choice holds for one life of a publisher at one address; a relay that passes buckets on is a publisher too.
    """

    def __init__(
        self, bulk: BulkReader, *, wanted: str = "auto", streams: int = 4, digested: bool = True,
        device: Callable[[], str] = lambda: "", say: Callable[[str], None] = log.info
    ) -> None:
        """`wanted`: weights.transport; `device` is asked when it matters: the UUID of the GPU that wants the bytes."""
        self._bulk, self._wanted, self._device, self._say = bulk, wanted, device, say
        self._raw = RawClient(bulk.settings, streams=streams, digested=digested)
        self._on_devices: dict[str, Any] = {}
        """"nccl" and "cuda_ipc", once they are used: they load torch."""
        self._choices: dict[tuple[str, str, str], Choice] = {}
        self._newest: Choice | None = None
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    async def fetch(self, ref: BulkRef, *, deadline_s: float, silent_s: float | None = None) -> np.ndarray:
        """See `Transport`. Raises TransportRefused when nothing serves, and what the transport raises."""
        transport = self._transport(ref)
        begun = time.monotonic()
        try:
            found: np.ndarray = await transport.fetch(ref, deadline_s=deadline_s, silent_s=silent_s)
            return found
        except BusError:
            self._counts["failed"] += 1
            raise
        finally:
            self._counts["fetches"] += 1
            self._seconds += time.monotonic() - begun

    def to_device(self, ref: BulkRef) -> DeviceTransport | None:
        """What brings this bucket to the GPU of this process; None: it comes through the host's memory."""
        return self._device_transport(self._choice(ref).transport)

    def is_local(self, ref: BulkRef) -> bool:
        """Whether `fetch` gives a view of the publisher's memory."""
        return self._choice(ref).transport == "shm"

    def check(self, ref: BulkRef) -> None:
        """Raises BulkGone if what `fetch` gave may have changed since."""
        self._bulk.check(ref)

    def statistics(self) -> dict[str, Any]:
        """Counts, and `transport` with its `reason` as last chosen."""
        newest = self._newest
        return {**self._counts, "seconds": self._seconds, "transport": "" if newest is None else newest.transport,
                "reason": "" if newest is None else newest.reason, "raw": self._raw.statistics(),
                "bulk": self._bulk.statistics(), "on_devices": {name: one.statistics()
                                                                for name, one in self._on_devices.items()}}

    def close(self) -> None:
        """End its own transports; the bulk plane's reader is its owner's."""
        self._raw.close()
        for transport in self._on_devices.values():
            transport.close()

    def _transport(self, ref: BulkRef) -> Any:
        choice = self._choice(ref)
        found = self._device_transport(choice.transport)
        if found is not None:
            return found
        return self._raw if choice.transport == "stream" and ref.address.startswith(RAW) else self._bulk

    def _device_transport(self, name: str) -> Any:
        if name not in TO_GPUS:
            return None
        if name not in self._on_devices:
            from cosmos_actor.weight_plane.transports.mapped import MappedTransport
            from cosmos_actor.weight_plane.transports.pair import gpu_number
            from cosmos_actor.weight_plane.transports.paired import PairTransport

            device, settings = f"cuda:{gpu_number()}", self._bulk.settings
            self._on_devices[name] = (MappedTransport(settings, device) if name == "cuda_ipc" else
                                      PairTransport(settings, "nccl", device))
        return self._on_devices[name]

    def _choice(self, ref: BulkRef) -> Choice:
        life = (ref.owner, ref.incarnation, ref.address)
        known = self._choices.get(life)
        if known is None:
            known = choose(self._wanted, self._topology(ref))
            for old in [old for old in self._choices if old[0] == ref.owner]:
                del self._choices[old]
            self._choices[life] = self._newest = known
            self._say(f"{known}; published by {ref.owner}")
        return known

    def _topology(self, ref: BulkRef) -> Topology:
        one_host = ref.host_id == host_id()
        unmappable = "" if one_host and self._bulk.is_local(ref) else "the publisher's memory can not be mapped here"
        far = device_of(ref.address)
        near = self._device() if far else ""
        return Topology(near=End(host_id(), near), far=End(ref.host_id, far), address=ref.address,
                        unmappable=unmappable, libraries=_libraries() if near else frozenset())


@lru_cache
def _libraries() -> frozenset[str]:
    """What is there at both ends: a publisher that names a GPU in its address has all of it."""
    if find_spec("torch") is None:
        return frozenset()
    import torch

    names = {"torch": True, "cuda": torch.cuda.is_available(), "nccl": torch.distributed.is_nccl_available()}
    return frozenset(name for name, there in names.items() if there)
