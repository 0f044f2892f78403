"""A publisher on a device in a process of its own: `publisher_process DEVICE [MIB]`. It does what each line on stdin
says, and prints one line.

    a number   publish that version, in buckets of 1 MiB, with a tensor of MIB more: its manifest
    flip       flip a bit of the newest version's first tensor, where it lies: what the version's digest is then
    mend       another snapshot of the same weights: the tensors that were put right from it
    die N      end with kill -9 when a bucket is asked for the N-th time from now
"""

from __future__ import annotations

import base64
import itertools
import os
import signal
import sys

import torch

from cosmos_actor.bus.identity import Identity, new_incarnation
from cosmos_actor.bus.schema import encode
from cosmos_actor.trainer.device_snapshots import DeviceSnapshots
from cosmos_actor.weight_plane.device_publisher import DevicePublisher
from cosmos_actor.weight_plane.flat_pool import FlatPool
from cosmos_actor.weight_plane.transports.flat_giving import FlatServer
from cosmos_actor.weight_plane.transports.handles import shareable
from cosmos_actor.weight_plane.version import Version

from .models import torch_model


class Trainer:
    def __init__(self, device: str, mebibytes: int) -> None:
        self.pool = FlatPool(torch.device(device), bucket_bytes=1 << 20, allocate=shareable)
        identity = Identity("run", "policy", "policy-0", new_incarnation())
        self.server = FlatServer(identity, self.pool, lambda: "127.0.0.1", "GPU-1")
        self.publisher = DevicePublisher(self.server, self.pool)
        self.snapshots = DeviceSnapshots(self.pool)
        self.device, self.more = device, mebibytes

    def model(self, step: int) -> dict[str, torch.Tensor]:
        model = torch_model(step, self.device)
        if self.more:
            model["more"] = torch.full((self.more << 20,), step % 256, dtype=torch.uint8, device=self.device)
        return model

    def publish(self, step: int) -> str:
        self.publisher.make_room()
        snapshot = self.snapshots.take(self.model(step))
        manifest = self.publisher.publish(Version("run", 0, step), snapshot.arrays())
        snapshot.release()
        return base64.b64encode(encode(manifest)[0]).decode()

    def flip(self) -> str:
        manifest = self.publisher.newest
        with self.server.store.reading(manifest.buckets[0].generation) as found:
            found.tensor[100] ^= 1
            found.tensor[100].item()  # waits for it
        return self.publisher.digest_now(manifest)

    def mend(self) -> str:
        manifest = self.publisher.newest
        self.publisher.make_room()
        snapshot = self.snapshots.take(self.model(manifest.version.step))
        mended = self.publisher.put_right(manifest, snapshot.arrays())
        snapshot.release()
        return " ".join(mended)

    def die(self, count: int) -> str:
        reading, asked = self.server.store.reading, itertools.count(1)

        def last(generation: int):
            if next(asked) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return reading(generation)

        self.server.store.reading = last
        return "ready"


def main() -> None:
    trainer = Trainer(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 0)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        does = {"flip": trainer.flip, "mend": trainer.mend}
        said = does[word]() if word in does else trainer.die(int(rest)) if rest else trainer.publish(int(word))
        print(said, flush=True)
    trainer.server.close()


if __name__ == "__main__":
    main()
