"""The engine's side on a device: a version comes from the publisher's GPU into a flat of this process's own.

    manifest ──> every bucket into the flat ──> digests of the flat, one pass ──> name -> view of the flat

A version always comes whole here: it is there before it were known what changed. torch is loaded by the first pull.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.errors import DeadlineExceeded
from cosmos_actor.weight_plane.errors import WeightError, WeightsCorrupt
from cosmos_actor.weight_plane.flat_layout import FlatLayout, layout_of
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.transports.interface import DeviceTransport

if TYPE_CHECKING:
    import torch

    from cosmos_actor.weight_plane.flat import Flat, FlatTensors

Choose = Callable[[BulkRef], DeviceTransport | None]
"""What brings this bucket to a device here; None: it comes through the host's memory."""


class DevicePull:
    """Invariant: the flat that a version is fetched into is in nobody else's hands.

    It is used again for the next version, unless whoever took the last one still has it, or a fetch into it failed:
    what was left behind may still write there.
    """

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._flat: Flat | None = None
        self._given: weakref.ref[FlatTensors] | None = None
        self._counts = {"device_pulls": 0, "flats_made": 0}

    def transport_for(self, manifest: Manifest) -> DeviceTransport | None:
        """What brings this version; None where it was not published from a device, or none can be used here."""
        return None if layout_of(manifest) is None else self._choose(manifest.buckets[0])

    async def pull(self, transport: DeviceTransport, manifest: Manifest, until: float,
                   deadline_s: float) -> FlatTensors:
        """Name -> verified tensor on the device, to be kept as long as any of them is used.

        `until` is on the event loop's clock. Raises WeightsCorrupt naming the first tensor whose bytes are wrong,
        BulkGone if the version was freed meanwhile, and what the transport does.
        """
        layout = layout_of(manifest)
        assert layout is not None
        flat, self._flat = self._fitting(layout, transport.device), None
        left = self._left(manifest, until, deadline_s)
        fetches = [asyncio.ensure_future(transport.fetch_into(ref, target, deadline_s=left))
                   for ref, target in zip(manifest.buckets, flat.buffers, strict=True)]
        try:
            await asyncio.gather(*fetches)
        except BaseException:
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)
            raise
        wrong = await asyncio.get_running_loop().run_in_executor(None, _wrong, flat, manifest)
        self._flat = flat
        if wrong:
            for ref in manifest.buckets:
                await transport.lives(ref, deadline_s=self._left(manifest, until, deadline_s))
            raise WeightsCorrupt(wrong, "its bytes are not those of the manifest", peer=manifest.buckets[0].owner)
        tensors = flat.tensors()
        self._given = weakref.ref(tensors)
        self._counts["device_pulls"] += 1
        return tensors

    def statistics(self) -> dict[str, Any]:
        return dict(self._counts)

    def _fitting(self, layout: FlatLayout, device: torch.device) -> Flat:
        """The one that is there, or a new one."""
        flat = self._flat
        in_use = self._given is not None and self._given() is not None
        if flat is not None and not in_use and flat.device == device and _alike(flat.layout, layout):
            return flat
        self._flat = None  # before the next is made: there may be no room for both
        del flat
        from cosmos_actor.weight_plane.flat import Flat, NoDeviceMemory, aside

        self._counts["flats_made"] += 1
        try:
            with aside(device):  # the zeros are there when this ends, and do not come over what is fetched
                return Flat(layout, device)
        except NoDeviceMemory as error:
            raise WeightError(f"a version of {layout.nbytes} bytes does not fit beside what else is on {device}; with"
                              " \"shm\" it comes to the host's memory", setting="weights.transport") from error

    def _left(self, manifest: Manifest, until: float, deadline_s: float) -> float:
        left = until - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineExceeded(f"version {manifest.version} was not whole after {deadline_s:g} s",
                                   peer=manifest.buckets[0].owner, setting="weights.deadline_s")
        return left


def _alike(one: FlatLayout, other: FlatLayout) -> bool:
    return (one.contents, one.places, one.buckets) == (other.contents, other.places, other.buckets)


def _wrong(flat: Flat, manifest: Manifest) -> str:
    """The first tensor that is not the manifest's, or nothing."""
    from cosmos_actor.weight_plane.flat import aside

    with aside(flat.device):
        digests = flat.digests()
    return next((entry.name for entry in manifest.tensors if digests[entry.name] != entry.digest), "")
