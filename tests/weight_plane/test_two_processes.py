"""Weights from one process to another over the real bulk plane: mapped on one host, streamed to another."""

from __future__ import annotations

import asyncio
import base64
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.streams import StreamClient
from cosmos_actor.bus.errors import BulkGone
from cosmos_actor.bus.schema import decode
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.errors import WeightsCorrupt
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.subscriber import WeightSubscriber

from .models import large_model

DEADLINE_S = 20.0


class Trainer:
    """The other process."""

    def __init__(self, popen) -> None:
        command = [sys.executable, "-m", "tests.weight_plane.trainer_process"]
        self.process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def publish(self, step: int) -> Manifest:
        return decode(base64.b64decode(self.say(str(step))), [])

    def say(self, line: str) -> str:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(5)


@pytest.fixture
def trainer(popen) -> Trainer:
    return Trainer(popen)


@pytest.fixture
def reader() -> Iterator[BulkReader]:
    settings = BulkSettings(chunk_bytes=MIB, lost_s=0.5)
    made = BulkReader(settings, StreamClient(settings))
    yield made
    made.close()


def from_another_host(manifest: Manifest) -> Manifest:
    return replace(manifest, buckets=[replace(ref, host_id="another") for ref in manifest.buckets])


def pull(subscriber: WeightSubscriber, manifest: Manifest) -> dict[str, np.ndarray]:
    return asyncio.run(subscriber.pull(manifest, DEADLINE_S))


@pytest.mark.parametrize("seen", [lambda manifest: manifest, from_another_host], ids=["mapped", "streamed"])
def test_every_version_arrives_whole(trainer, reader, seen):
    subscriber = WeightSubscriber(reader, "run")
    for step in (1, 2, 3):
        manifest = seen(trainer.publish(step))
        pulled = pull(subscriber, manifest)
        expected = large_model(step)
        assert list(pulled) == list(expected)
        assert all(np.array_equal(pulled[name], expected[name]) for name in expected)
        assert weights_digest(pulled) == manifest.digest
    assert len(manifest.buckets) == 6 and len(manifest.tensors) == 27
    streamed = reader.statistics()["streamed"]
    assert streamed == (0 if seen(manifest) is manifest else 3 * len(manifest.buckets))


@pytest.mark.parametrize("seen", [lambda manifest: manifest, from_another_host], ids=["mapped", "streamed"])
def test_a_version_that_was_freed_is_gone_and_the_newest_is_there(trainer, reader, seen):
    subscriber = WeightSubscriber(reader, "run")
    manifests = [seen(trainer.publish(step)) for step in (1, 2, 3)]
    with pytest.raises(BulkGone):
        pull(subscriber, manifests[0])
    assert subscriber.newest is None
    pull(subscriber, manifests[2])


@pytest.mark.parametrize("seen", [lambda manifest: manifest, from_another_host], ids=["mapped", "streamed"])
def test_a_trainer_that_was_killed_takes_its_versions_along(trainer, reader, seen):
    subscriber = WeightSubscriber(reader, "run")
    manifest = seen(trainer.publish(1))
    trainer.kill()
    with pytest.raises(BulkGone):
        pull(subscriber, manifest)


def test_bytes_that_are_not_the_manifests_are_refused(trainer, reader):
    mine, other = trainer.publish(1), trainer.publish(2)
    swapped = replace(mine, buckets=other.buckets)
    with pytest.raises(WeightsCorrupt):
        pull(WeightSubscriber(reader, "run"), swapped)


@pytest.mark.parametrize("seen", [lambda manifest: manifest, from_another_host], ids=["mapped", "streamed"])
def test_a_byte_that_fell_over_in_shared_memory_is_seen_named_and_put_right(trainer, reader, seen):
    subscriber = WeightSubscriber(reader, "run")
    manifest = seen(trainer.publish(1))
    first = manifest.tensors[0].name
    assert trainer.say("mend") == ""
    assert trainer.say("flip") not in ("", manifest.digest)
    for _ in range(2):
        with pytest.raises(WeightsCorrupt, match=f"tensor {first}: its bytes are not those of the manifest"):
            pull(subscriber, manifest)
    assert subscriber.newest is None
    assert trainer.say("mend") == first and trainer.say("mend") == ""
    assert weights_digest(pull(subscriber, manifest)) == manifest.digest
