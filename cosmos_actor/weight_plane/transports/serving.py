"""The publisher's side: a bulk store whose references lead other hosts to a raw server instead of the bulk plane's."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.weight_plane.transports.giving import Giving
from cosmos_actor.weight_plane.transports.raw_server import RawServer


class ServedStore:
    """A bulk store as a publisher needs it. Readers of its own host map its memory as before.

    The server listens beside the bulk plane's own, from the first put on; where that serves nobody (an actor that only
    dials out, roles in one process), neither does this.
    """

    def __init__(self, store: BulkStore, giving: Giving | None = None, device: str = "") -> None:
        """`device`: the GPU (its UUID) that `giving` gives from."""
        self._store, self._device = store, device
        self._server = RawServer(store, giving)
        self._starting = threading.Lock()

    def try_put(self, array: Any, *, holder: str, **options: Any) -> BulkRef:
        ref = self._store.try_put(array, holder=holder, **options)
        if not ref.address:
            return ref
        with self._starting:  # two threads may be at the first put
            if not self._server.address:
                host = ref.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
                self._server.start(host, self._device)
        return replace(ref, address=self._server.address)

    def reading(self, generation: int) -> Any:
        return self._store.reading(generation)

    def release(self, ref: BulkRef, holder: str) -> bool:
        return self._store.release(ref, holder)

    def statistics(self) -> dict[str, Any]:
        return self._server.statistics()

    def close(self) -> None:
        """Serve nobody any more; the store lives on."""
        self._server.close()


def served(store: BulkStore, transport: str, protection: str) -> BulkStore | ServedStore:
    """The store for a publisher, by the settings weights.transport and weights.protection: as it is where the bulk
    plane's own streams do."""
    if transport == "nccl":
        from cosmos_actor.weight_plane.transports.pair import PairGiving, gpu

        return ServedStore(store, PairGiving("cuda"), gpu())
    return store if protection == "encrypted" else ServedStore(store)
