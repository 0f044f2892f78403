"""A publisher in a process of its own: `publisher_process [DEVICE]`. It publishes a version for each line on stdin and
prints its manifest; readers on other hosts find a raw server, and with a device (cpu, cuda:0) groups of two."""

from __future__ import annotations

import base64
import sys

from cosmos_actor.bus.bulk.server import BulkServer
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.identity import Identity, new_incarnation
from cosmos_actor.bus.schema import encode
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.transports.serving import ServedStore
from cosmos_actor.weight_plane.version import Version
from tests.weight_plane.models import large_model


def main() -> None:
    giving = None
    if sys.argv[1:]:
        from cosmos_actor.weight_plane.transports.pair import PairGiving

        giving = PairGiving(sys.argv[1])
    store = BulkStore(Identity("run", "policy", "policy-0", new_incarnation()), BulkSettings(budget_bytes=64 * MIB))
    server = BulkServer(store)
    server.start("tcp://127.0.0.1:0")
    served = ServedStore(store, giving)
    publisher = WeightPublisher(served, bucket_bytes=MIB)
    for line in sys.stdin:
        manifest = publisher.publish(Version("run", 0, int(line)), large_model(int(line)))
        print(base64.b64encode(encode(manifest)[0]).decode(), flush=True)
    served.close()
    server.close()
    store.close()


if __name__ == "__main__":
    main()
