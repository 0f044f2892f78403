"""The reader that a subscriber has: one choice for each publisher, said once, and every version whole by it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.streams import StreamClient
from cosmos_actor.bus.errors import BulkGone
from cosmos_actor.bus.identity import host_id
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.transports.interface import TransportRefused
from cosmos_actor.weight_plane.transports.reader import TransportReader
from tests.bulk.tools import store
from tests.weight_plane.models import large_model

from .tools import DEADLINE_S, QUICK, Publisher


@pytest.fixture
def publisher(popen):
    return Publisher(popen)


@pytest.fixture
def bulk():
    made = BulkReader(QUICK, StreamClient(QUICK))
    yield made
    made.close()


@pytest.fixture
def said():
    return []


@pytest.fixture
def make(bulk, said):
    made = []

    def make(**options):
        made.append(TransportReader(bulk, say=said.append, **options))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


def here(manifest):
    return replace(manifest, buckets=[replace(ref, host_id=host_id()) for ref in manifest.buckets])


def pull(reader, *manifests):
    subscriber = WeightSubscriber(reader, "run")

    async def all_of_them():
        return [await subscriber.pull(manifest, DEADLINE_S) for manifest in manifests]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("digested", [True, False])
def test_versions_come_by_raw_streams_from_another_host_and_that_is_said_once(publisher, make, said, digested):
    reader = make(digested=digested)
    manifests = [publisher.publish(step) for step in (1, 2)]
    for pulled, manifest in zip(pull(reader, *manifests), manifests, strict=True):
        assert weights_digest(pulled) == manifest.digest
    address = manifests[0].buckets[0].address
    assert said == [f"weights come by stream: the ends are on two hosts; raw TCP from {address}; published by"
                    " policy-0"]
    statistics = reader.statistics()
    assert statistics["transport"] == "stream" and address in statistics["reason"]
    assert statistics["fetches"] == statistics["raw"]["streamed"] == 12


def test_versions_come_by_shared_memory_on_one_host(publisher, make, said):
    reader = make()
    manifest = here(publisher.publish(3))
    assert all(reader.is_local(ref) for ref in manifest.buckets)
    pulled = pull(reader, manifest)[0]
    assert all(np.array_equal(pulled[name], tensor) for name, tensor in large_model(3).items())
    assert said == ["weights come by shm: both ends are on one host; published by policy-0"]


def test_a_stream_that_is_asked_for_is_taken_on_one_host_too(publisher, make):
    reader = make(wanted="stream")
    manifest = here(publisher.publish(3))
    assert not reader.is_local(manifest.buckets[0])
    pull(reader, manifest)
    assert reader.statistics()["raw"]["streamed"] == 6


def test_streams_of_the_bulk_plane_itself_serve_as_before(make, bulk):
    from tests.bulk.tools import elsewhere, pattern, served

    with store(1 << 22) as made, served(made):
        ref = elsewhere(made.try_put(pattern(1 << 21), holder="a"))
        reader = make()
        assert np.array_equal(asyncio.run(reader.fetch(ref, deadline_s=DEADLINE_S)), pattern(1 << 21))
        assert reader.statistics()["bulk"]["streamed"] == 1


@pytest.mark.parametrize(("wanted", "line"), [("shm", "on another host"), ("nccl", "no two GPUs")])
def test_one_that_can_not_serve_is_refused_before_anything_is_fetched(publisher, make, wanted, line):
    reader = make(wanted=wanted)
    with pytest.raises(TransportRefused, match=line):
        pull(reader, publisher.publish(1))


def test_a_publisher_in_its_next_life_is_chosen_for_anew(popen, make, said):
    reader = make()
    for step in (1, 2):
        publisher = Publisher(popen)
        manifest = publisher.publish(step)
        asyncio.run(reader.fetch(manifest.buckets[0], deadline_s=DEADLINE_S))
        publisher.kill()
        with pytest.raises(BulkGone):
            asyncio.run(reader.fetch(manifest.buckets[1], deadline_s=DEADLINE_S))
    assert len(said) == 2 and reader.statistics()["failed"] == 2
