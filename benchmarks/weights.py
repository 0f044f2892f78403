"""What a version of the weights costs: candidate digests alone, then publish, pull and swap of a model on one host.

    python benchmarks/weights.py [--mib 256]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import time
from collections.abc import Callable

import numpy as np

from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.identity import Identity, new_incarnation
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.version import Version

CANDIDATES = ("sha256", "blake2b", "blake2s", "sha1", "sha3_256")
ROUNDS = 5


def best_of(action: Callable[[], object]) -> float:
    """Seconds of the quickest round."""
    took = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        action()
        took.append(time.perf_counter() - begun)
    return min(took)


def candidate_rates(nbytes: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    for name in CANDIDATES:
        seconds = best_of(lambda name=name: hashlib.new(name, data).digest())
        print(f"{name:10} {nbytes / seconds / 2**30:6.2f} GiB/s on one core")


def a_model(nbytes: int) -> dict[str, np.ndarray]:
    """Tensors of 4 MiB and their norms, as a decoder has them."""
    rng = np.random.default_rng(0)
    model = {f"layers.{n}.weight": rng.random((1024, 1024), np.float32) for n in range(max(1, nbytes // (4 * MIB)))}
    return {**model, **{f"{name}.norm": np.ones(1024, np.float32) for name in model}}


def version_times(nbytes: int) -> None:
    model = a_model(nbytes)
    size = sum(array.nbytes for array in model.values())
    store = BulkStore(Identity("run", "policy", "policy-0", new_incarnation()), BulkSettings(budget_bytes=3 * size))
    publisher, reader = WeightPublisher(store), BulkReader()
    subscriber = WeightSubscriber(reader, "run")
    steps = iter(range(ROUNDS * 2))
    publish = best_of(lambda: publisher.publish(Version("run", 0, next(steps)), model))

    def pull() -> None:
        manifest = publisher.publish(Version("run", 0, next(steps)), model)
        begun = time.perf_counter()
        asyncio.run(subscriber.pull(manifest, 60.0))
        took.append(time.perf_counter() - begun)

    took: list[float] = []
    best_of(pull)
    digest = best_of(lambda: weights_digest(model))
    for name, seconds in (("publish", publish), ("pull", min(took)), ("digest", digest)):
        print(f"{name:10} {seconds * 1e3:8.1f} ms  {size / seconds / 2**30:6.2f} GiB/s  ({size / MIB:.0f} MiB)")
    reader.close()
    store.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--mib", type=int, default=256, help="size of the model")
    nbytes = options.parse_args().mib * MIB
    print(f"{os.cpu_count()} cores")
    candidate_rates(min(nbytes, 64 * MIB))
    version_times(nbytes)


if __name__ == "__main__":
    main()
