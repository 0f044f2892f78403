"""Deltas over the real bulk plane, as from another host: compared with what lies in the arena, and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.server import BulkServer
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.bulk.streams import StreamClient
from cosmos_actor.bus.identity import Identity, new_incarnation
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.subscriber import WeightSubscriber

from .models import large_model
from .test_publisher import version

pytest.importorskip("zstandard")


@pytest.fixture
def store() -> Iterator[BulkStore]:
    made = BulkStore(Identity("run", "policy", "policy-0", new_incarnation()), BulkSettings(budget_bytes=64 * MIB))
    server = BulkServer(made)
    server.start("tcp://127.0.0.1:0")
    yield made
    server.close()
    made.close()


@pytest.fixture
def reader() -> Iterator[BulkReader]:
    made = BulkReader(BulkSettings(), StreamClient(BulkSettings()))
    yield made
    made.close()


def elsewhere(manifest: Manifest) -> Manifest:
    def moved(ref):
        return replace(ref, host_id="another")

    deltas = [replace(delta, payload=moved(delta.payload)) for delta in manifest.deltas]
    return replace(manifest, buckets=[moved(ref) for ref in manifest.buckets], deltas=deltas)


def test_a_rollout_elsewhere_streams_what_changed_and_holds_what_was_trained(store, reader):
    publisher = WeightPublisher(store, bucket_bytes=MIB, deltas=True)
    subscriber = WeightSubscriber(reader, "run", delta="auto")
    model, rng = large_model(0), np.random.default_rng(1)
    size = sum(array.nbytes for array in model.values())
    for step in range(4):
        for name in ("embed", "layers.3.weight", "layers.5.norm"):
            changed = model[name].copy()
            changed.reshape(-1)[rng.integers(0, changed.size, 20)] += 1
            model = {**model, name: changed}
        manifest = elsewhere(publisher.publish(version(step), model))
        before = reader.statistics()["streamed_bytes"]
        pulled = asyncio.run(subscriber.pull(manifest, 20.0))
        assert weights_digest(pulled) == manifest.digest == weights_digest(model)
        streamed = reader.statistics()["streamed_bytes"] - before
        assert streamed < 2000 if step else streamed >= size
    publisher.close()
    assert store.statistics()["used_bytes"] == 0
