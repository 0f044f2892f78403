"""A trainer in a process of its own: does what each line on stdin says and prints one line.

    a number   publish that version: its manifest
    flip       flip a bit of the newest version's first tensor, where others read it: what its digest is then
    mend       compare what others read with what was published, and put it right: the tensors that were damaged
"""

from __future__ import annotations

import base64
import sys

from cosmos_actor.bus.bulk.server import BulkServer
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.identity import Identity, new_incarnation
from cosmos_actor.bus.schema import encode
from cosmos_actor.weight_plane.on_the_plane import digest_on_the_plane, put_right
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.version import Version
from tests.weight_plane.models import large_model


def main() -> None:
    store = BulkStore(Identity("run", "policy", "policy-0", new_incarnation()), BulkSettings(budget_bytes=64 * MIB))
    server = BulkServer(store)
    server.start("tcp://127.0.0.1:0")
    publisher = WeightPublisher(store, bucket_bytes=MIB)
    for line in map(str.strip, sys.stdin):
        newest = publisher.newest
        if line == "flip":
            entry = newest.tensors[0]
            with store.reading(newest.buckets[entry.bucket].generation) as block:
                block[entry.offset + entry.nbytes - 1] ^= 1
            print(digest_on_the_plane(store, newest), flush=True)
        elif line == "mend":
            print(" ".join(put_right(store, newest, large_model(newest.version.step))), flush=True)
        else:
            manifest = publisher.publish(Version("run", 0, int(line)), large_model(int(line)))
            print(base64.b64encode(encode(manifest)[0]).decode(), flush=True)
    server.close()
    store.close()


if __name__ == "__main__":
    main()
