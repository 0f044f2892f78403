"""How a raw server gives buckets that lie on a device: by groups of two, or by handles of the memory. Imports torch."""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgpack

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.identity import Identity
from cosmos_actor.weight_plane.flat_pool import FlatPool, Hold
from cosmos_actor.weight_plane.flat_store import FlatStore, Found
from cosmos_actor.weight_plane.transports.giving import Turn
from cosmos_actor.weight_plane.transports.handles import export
from cosmos_actor.weight_plane.transports.pair import PairGiving
from cosmos_actor.weight_plane.transports.raw_server import RawServer
from cosmos_actor.weight_plane.transports.raw_wire import HANDLE, LIVES, Ask


class FlatGiving:
    """See `Giving`."""

    def __init__(self, store: FlatStore, device: str) -> None:
        self._pairs = PairGiving(device, store.freed)

    def to(self, asker: socket.socket) -> Turn:
        return _FlatTurn(self._pairs.to(asker))


class _FlatTurn:
    """One asker's. It is told the handle of each buffer once: it keeps what it has mapped as long as it is here."""

    def __init__(self, pair: Turn) -> None:
        self._pair = pair
        self._told: set[tuple[int, int]] = set()

    def prepare(self, ask: Ask, found: Found) -> tuple[bytes, Callable[[], None]]:
        if ask.kind == LIVES:
            return b"", _nothing
        if ask.kind != HANDLE:
            return self._pair.prepare(ask, found)
        handle = None if found.number in self._told else export(found.tensor)
        self._told.add(found.number)
        return msgpack.packb([*found.number, handle]), _nothing

    def close(self) -> None:
        self._pair.close()


class FlatServer:
    """Leases buckets of flats, and serves them from the first on, at any free port of `host`. See `FlatStore`."""

    def __init__(self, identity: Identity, pool: FlatPool, host: Callable[[], str], device: str) -> None:
        """`device`: what stands in the address, the UUID of a GPU. `host` is asked when it is needed."""
        self.store = FlatStore(identity, pool)
        self._server = RawServer(self.store, FlatGiving(self.store, str(pool.device)))
        self._host, self._device = host, device

    def lease(self, hold: Hold) -> list[BulkRef]:
        return self.store.lease(hold, self._server.address or self._server.start(self._host(), self._device))

    def release(self, refs: list[BulkRef]) -> None:
        self.store.release(refs)

    def statistics(self) -> dict[str, int]:
        return self._server.statistics()

    def close(self) -> None:
        """Serve nobody any more."""
        self._server.close()


def _nothing() -> None:
    """All is said in the answer."""
