"""What the subscriber and the swap promise."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest

from cosmos_actor.bus.errors import BulkGone, BusError, DeadlineExceeded, PeerRefused
from cosmos_actor.weight_plane import source
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.errors import (
    DigestMismatch,
    ForeignRun,
    ManifestInvalid,
    VersionNotNewer,
    WeightsCorrupt,
)
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.source import ASKED_AT_MOST
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.swap import swap

from .memory_bulk import MemoryBulk
from .test_digest import a_model
from .test_publisher import broken, version


class Plane:
    """Publisher, subscriber and an engine over one bulk plane."""

    def __init__(self, bucket_bytes: int = 64) -> None:
        self.bulk = MemoryBulk()
        self.publisher = WeightPublisher(self.bulk, bucket_bytes=bucket_bytes)
        self.subscriber = WeightSubscriber(self.bulk, "run")
        self.engine = FakeEngine()

    def publish(self, step: int, epoch: int = 0):
        return self.publisher.publish(version(step, epoch), a_model(step))

    def pull(self, manifest, deadline_s: float = 10.0):
        return asyncio.run(self.subscriber.pull(manifest, deadline_s))


class FakeEngine:
    """Holds what it was given; `corrupt` makes it hold something else."""

    def __init__(self) -> None:
        self.tensors: Mapping[str, np.ndarray] = {}
        self.version = -1
        self.corrupt = False

    def load_weights(self, tensors, version, digest):
        assert version > self.version
        self.tensors, self.version = dict(tensors), version
        if self.corrupt:
            self.tensors["norm"] = self.tensors["norm"] + 1
        return weights_digest(self.tensors)


def equal(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> bool:
    return list(left) == list(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(left.values(), right.values(), strict=True))


@pytest.mark.parametrize("bucket_bytes", [1, 64, 128, 1 << 20])
def test_what_is_pulled_is_what_was_published(bucket_bytes):
    plane = Plane(bucket_bytes)
    pulled = plane.pull(plane.publish(1))
    assert equal(pulled, a_model(1))
    assert plane.subscriber.newest == version(1)
    assert plane.subscriber.statistics() == {
        "pulled": 1, "pulled_bytes": sum(a.nbytes for a in a_model().values()), "refused": 0, "newest": "0.1"}


def test_pulled_tensors_are_private():
    plane = Plane()
    pulled = plane.pull(plane.publish(1))
    for array in plane.bulk.arrays.values():
        array[:] = 0
    assert equal(pulled, a_model(1)) and all(array.flags.writeable for array in pulled.values())


def test_only_newer_versions_are_pulled_and_nothing_is_fetched_for_others():
    plane = Plane()
    first, second = plane.publish(1), plane.publish(2)
    plane.pull(second)
    fetched = len(plane.bulk.fetched)
    for manifest in (first, second):
        with pytest.raises(VersionNotNewer, match="not newer than 0.2, which the subscriber has"):
            plane.pull(manifest)
    assert len(plane.bulk.fetched) == fetched


def test_after_a_rewind_a_smaller_step_of_a_later_epoch_is_newer():
    plane = Plane()
    plane.pull(plane.publish(7))
    rewound = plane.publish(3, epoch=1)
    assert equal(plane.pull(rewound), a_model(3))
    assert rewound.version.ordinal > version(7).ordinal


def test_another_run_is_refused():
    plane = Plane()
    foreign = plane.publisher.publish(version(1, run="another"), a_model())
    with pytest.raises(ForeignRun, match="is of run another, this is run run"):
        plane.pull(foreign)
    assert plane.bulk.fetched == []


def test_a_manifest_that_contradicts_itself_is_refused_before_anything_is_fetched():
    plane = Plane()
    with pytest.raises(ManifestInvalid):
        plane.pull(broken(plane.publish(1), offset=1 << 20))
    assert plane.bulk.fetched == []


@pytest.mark.parametrize("name", ["embed", "norm", "half", "scale"])
def test_a_corrupt_tensor_is_named_and_the_version_can_be_pulled_again(name):
    plane = Plane()
    manifest = plane.publish(1)
    entry = next(entry for entry in manifest.tensors if entry.name == name)

    def flip(generation: int, array: np.ndarray) -> np.ndarray:
        if generation != manifest.buckets[entry.bucket].generation:
            return array
        flipped = array.copy()
        flipped[entry.offset + entry.nbytes - 1] ^= 1
        return flipped

    plane.bulk.on_fetch = flip
    with pytest.raises(WeightsCorrupt, match=f"tensor {name}: .*peer policy-0") as raised:
        plane.pull(manifest)
    assert raised.value.tensor == name and plane.subscriber.newest is None
    plane.bulk.on_fetch = lambda _, array: array
    assert equal(plane.pull(manifest), a_model(1))


def test_a_version_freed_before_or_during_the_pull_is_gone_not_corrupt():
    plane = Plane()
    first = plane.publish(1)

    def free_and_reuse(generation: int, array: np.ndarray) -> np.ndarray:
        plane.publisher.close()
        return np.zeros_like(array)

    plane.bulk.on_fetch = free_and_reuse
    with pytest.raises(BulkGone):
        plane.pull(first)
    with pytest.raises(BulkGone):
        plane.pull(first)
    assert plane.subscriber.newest is None and plane.subscriber.statistics()["refused"] == 2


def test_a_pull_that_runs_out_of_time_gives_nothing_and_names_what_is_missing():
    plane = Plane()
    with pytest.raises(DeadlineExceeded, match=r"0.1 was not whole after 0 s: tensor \w+ .* `weights.deadline_s`"):
        plane.pull(plane.publish(1), deadline_s=0.0)
    assert plane.subscriber.newest is None


def test_two_pulls_at_once_leave_the_newer_version():
    plane = Plane()
    first, second = plane.publish(1), plane.publish(2)

    async def both():
        pulls = plane.subscriber.pull(second, 10.0), plane.subscriber.pull(first, 10.0)
        return await asyncio.gather(*pulls, return_exceptions=True)

    newer, older = asyncio.run(both())
    assert equal(newer, a_model(2)) and isinstance(older, VersionNotNewer)


def test_a_cancelled_pull_leaves_no_task_and_no_version():
    plane = Plane()
    manifest = plane.publish(1)

    async def cancel():
        entered = asyncio.Event()

        async def hang(ref, *, deadline_s):
            entered.set()
            await asyncio.Event().wait()

        plane.bulk.fetch = hang
        pull = asyncio.ensure_future(plane.subscriber.pull(manifest, 10.0))
        await entered.wait()
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        return len(asyncio.all_tasks())

    assert asyncio.run(cancel()) == 1 and plane.subscriber.newest is None


def test_swap_returns_what_the_engine_says_it_holds():
    plane = Plane()
    manifest = plane.publish(4)
    held = swap(plane.engine, manifest, plane.pull(manifest))
    assert held.version == version(4) and held.digest == manifest.digest == weights_digest(plane.engine.tensors)
    assert plane.engine.version == version(4).ordinal


def test_an_engine_that_holds_something_else_is_not_believed():
    plane = Plane()
    manifest = plane.publish(4)
    plane.engine.corrupt = True
    with pytest.raises(DigestMismatch, match=f"version 0.4 has digest {manifest.digest[:16]}, the engine reports"):
        swap(plane.engine, manifest, plane.pull(manifest))


def test_a_corrupt_version_never_reaches_the_engine():
    plane = Plane()
    first = plane.publish(1)
    swap(plane.engine, first, plane.pull(first))
    second = plane.publish(2)
    plane.bulk.on_fetch = lambda _, array: np.zeros_like(array)
    with pytest.raises(BusError):
        swap(plane.engine, second, plane.pull(second))
    assert plane.engine.version == version(1).ordinal and equal(plane.engine.tensors, a_model(1))


@pytest.mark.parametrize(("refusals", "taken"), [(0, True), (ASKED_AT_MOST - 1, True), (ASKED_AT_MOST, False)])
def test_an_owner_that_refuses_is_asked_again_a_few_times(monkeypatch, refusals, taken):
    """A handshake that was damaged on the way looks like a wrong key, and a version that is not taken ends a job."""
    monkeypatch.setattr(source, "ASK_AGAIN_S", 0.001)
    plane, left = Plane(bucket_bytes=1 << 20), [refusals]

    def refuse(generation: int, array: np.ndarray) -> np.ndarray:
        left[0] -= 1
        if left[0] >= 0:
            raise PeerRefused("it does not hold the key of its role")
        return array

    plane.bulk.on_fetch = refuse
    manifest = plane.publish(1)
    if taken:
        assert equal(plane.pull(manifest), a_model(1))
    else:
        with pytest.raises(PeerRefused):
            plane.pull(manifest)
