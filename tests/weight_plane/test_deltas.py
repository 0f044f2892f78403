"""Publisher and subscriber with deltas: when they are taken and from where, and what comes whole in their place."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from cosmos_actor.bus.errors import BulkFull, DeadlineExceeded
from cosmos_actor.bus.identity import host_id
from cosmos_actor.bus.schema import decode, encode
from cosmos_actor.weight_plane.delta_publisher import worth_making
from cosmos_actor.weight_plane.digest import tensor_digests, weights_digest
from cosmos_actor.weight_plane.errors import ManifestInvalid, WeightError
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.subscriber import WeightSubscriber

from .memory_bulk import MemoryBulk
from .test_publisher import version

pytest.importorskip("zstandard")

SIZE = 20_000


def a_version(step: int, share: float = 0.01) -> dict[str, np.ndarray]:
    """Step 0, and what so many steps changed since."""
    rng = np.random.default_rng(0)
    model = {"w": rng.integers(0, 1 << 16, SIZE, np.uint16), "b": rng.standard_normal(500).astype(np.float32)}
    for number in range(1, step + 1):
        rng = np.random.default_rng(number)
        model["w"] = model["w"] + (rng.random(SIZE) < share).astype(np.uint16)
    return model


class Plane:
    """Publisher and subscriber; the bulk plane says that it is another host's."""

    def __init__(self, delta: str = "auto", keep: int = 2, local: bool = False, budget_bytes: int = 1 << 30) -> None:
        self.bulk = MemoryBulk(budget_bytes)
        if local:
            self.bulk.host_id = host_id()
        self.publisher = WeightPublisher(self.bulk, keep=keep, bucket_bytes=1 << 14, deltas=True)
        self.subscriber = self.another(delta)

    def another(self, delta: str = "auto") -> WeightSubscriber:
        return WeightSubscriber(self.bulk, "run", delta=delta)  # type: ignore[arg-type]

    def publish(self, step: int, share: float = 0.01, epoch: int = 0) -> Manifest:
        return decode(*encode(self.publisher.publish(version(step, epoch), a_version(step, share))))

    def pull(self, manifest: Manifest, subscriber: WeightSubscriber | None = None) -> dict[str, np.ndarray]:
        """Pulls and compares with the manifest's digest; what was fetched is in `fetched`."""
        self.bulk.fetched.clear()
        tensors = asyncio.run((subscriber or self.subscriber).pull(manifest, 10.0))
        assert weights_digest(tensors) == manifest.digest
        return tensors

    @property
    def fetched(self) -> list[int]:
        return list(self.bulk.fetched)


def payloads(manifest: Manifest, last: int) -> list[int]:
    return [delta.payload.generation for delta in manifest.deltas[-last:]]


def buckets(manifest: Manifest) -> list[int]:
    return [ref.generation for ref in manifest.buckets]


def test_the_first_version_comes_whole_and_the_next_as_what_changed():
    plane = Plane()
    first = plane.publish(0)
    assert first.deltas == [] and first.why_whole == "it is the first"
    plane.pull(first)
    assert plane.fetched == buckets(first)
    for step in range(1, 4):
        manifest = plane.publish(step)
        plane.pull(manifest)
        assert plane.fetched == payloads(manifest, 1)
        assert manifest.deltas[-1].payload.nbytes < 0.03 * manifest.nbytes
    found = plane.subscriber.statistics()
    assert (found["deltas"], found["whole_bytes"]) == (3, first.nbytes) and found["base_bytes"] >= first.nbytes
    assert found["pulled"] == 4 and found["delta_bytes"] < 0.1 * first.nbytes


def test_tensors_stay_as_they_are_for_who_holds_them_and_else_are_changed_in_place():
    plane = Plane()
    held = plane.pull(plane.publish(0))
    part = plane.pull(plane.publish(1))["w"][3:9]
    assert weights_digest(held) == weights_digest(a_version(0))
    plane.pull(plane.publish(2, 0.9))
    plane.pull(plane.publish(3, 0.9))
    assert np.array_equal(part, a_version(1)["w"][3:9])
    addresses = {plane.pull(plane.publisher.publish(version(step), a_version(3, 0.9)))["w"].ctypes.data
                 for step in range(4, 8)}
    assert len(addresses) == 1


def test_who_missed_versions_takes_a_chain():
    plane = Plane()
    plane.pull(plane.publish(0))
    plane.publish(1)
    plane.publish(2)
    manifest = plane.publish(3)
    plane.pull(manifest)
    assert plane.fetched == payloads(manifest, 3)


def test_who_comes_late_takes_the_version_whole():
    plane = Plane()
    for step in range(3):
        manifest = plane.publish(step)
    late = plane.another()
    plane.pull(manifest, late)
    assert plane.fetched == buckets(manifest)
    following = plane.publish(3)
    plane.pull(following, late)
    assert plane.fetched == payloads(following, 1)


def test_a_gap_that_no_delta_leads_over_comes_whole(monkeypatch):
    monkeypatch.setattr("cosmos_actor.weight_plane.delta_publisher.MOST_DELTAS", 2)
    plane = Plane()
    plane.pull(plane.publish(0))
    for step in range(1, 4):
        manifest = plane.publish(step)
    assert len(manifest.deltas) == 2
    plane.pull(manifest)
    assert plane.fetched == buckets(manifest)
    assert "no delta leads there from version 0.0, which is held" in plane.subscriber.statistics()["came"]


def test_a_chain_with_more_bytes_than_the_version_is_not_taken(monkeypatch):
    monkeypatch.setattr("cosmos_actor.weight_plane.delta_publisher.MOST_BYTES", 100)
    monkeypatch.setattr("cosmos_actor.weight_plane.delta_publisher.MOST_DELTAS", 100)
    plane = Plane()
    plane.pull(plane.publish(0, 0.2))
    for step in range(1, 26):
        manifest = plane.publish(step, 0.2)
    assert sum(delta.payload.nbytes for delta in manifest.deltas) > manifest.nbytes
    plane.pull(manifest)
    assert plane.fetched == buckets(manifest)
    assert plane.subscriber.statistics()["came"] == "whole: the deltas from the version that is held have more bytes"


def test_all_deltas_of_a_manifest_take_less_than_half_of_the_version():
    plane = Plane()
    for step in range(12):
        manifest = plane.publish(step, 0.2)
    assert 1 < len(manifest.deltas) < 11
    assert sum(delta.payload.nbytes for delta in manifest.deltas) <= manifest.nbytes / 2


def test_what_is_not_sparse_comes_whole_says_why_and_later_versions_are_deltas_again():
    plane = Plane()
    plane.pull(plane.publish(0))
    dense = plane.publish(1, 0.9)
    assert dense.deltas == [] and dense.why_whole == "more than 25% of its elements changed"
    plane.pull(dense)
    assert plane.fetched == buckets(dense)
    assert plane.subscriber.statistics()["came"] == "whole: more than 25% of its elements changed"
    tensors = a_version(1, 0.9)
    tensors["b"][7] += 1
    manifest = plane.publisher.publish(version(2), tensors)
    plane.pull(manifest)
    assert plane.fetched == payloads(manifest, 1)


def test_a_version_in_which_nothing_changed_is_a_delta_of_next_to_nothing():
    plane = Plane()
    plane.pull(plane.publish(0))
    manifest = plane.publisher.publish(version(1), a_version(0))
    plane.pull(manifest)
    assert plane.fetched == payloads(manifest, 1) and manifest.deltas[-1].payload.nbytes < 400
    assert plane.subscriber.newest == version(1)


def test_another_model_comes_whole():
    plane = Plane()
    plane.pull(plane.publish(0))
    manifest = plane.publisher.publish(version(1), {**a_version(0), "more": np.ones(3, np.float32)})
    assert manifest.why_whole == "its tensors have other names, dtypes or shapes than those before"
    assert set(plane.pull(manifest)) == {"w", "b", "more"}


def test_after_a_rewind_the_delta_leads_on_from_what_was_published_last():
    plane = Plane()
    plane.pull(plane.publish(3))
    rewound = plane.publish(1, epoch=1)
    plane.pull(rewound)
    assert plane.fetched == payloads(rewound, 1)


def test_a_damaged_delta_is_refused_the_old_version_kept_and_the_version_taken_whole(caplog):
    plane = Plane()
    plane.pull(plane.publish(0))
    manifest = plane.publish(1)
    payload = manifest.deltas[-1].payload.generation

    def damage(generation: int, array: np.ndarray) -> np.ndarray:
        if generation != payload:
            return array
        damaged = array.copy()
        damaged[len(damaged) // 2] ^= 1
        return damaged

    plane.bulk.on_fetch = damage
    plane.pull(manifest)
    assert plane.fetched == [payload, *buckets(manifest)]
    assert plane.subscriber.statistics()["deltas_refused"] == 1
    assert "weights 0.1 come whole: WeightsCorrupt" in caplog.text
    following = plane.publish(2)
    plane.pull(following)
    assert plane.fetched == payloads(following, 1)


def test_a_delta_from_a_version_that_lay_damaged_at_the_publisher_is_refused():
    """Digests are of what was trained, not of what the delta is thought to lead to."""
    plane = Plane()
    first = plane.publish(0)
    plane.pull(first)
    entry = first.tensors[0]
    plane.bulk.arrays[buckets(first)[entry.bucket]][entry.offset + 5] ^= 1
    manifest = plane.publish(1)
    plane.pull(manifest)
    assert plane.fetched == [*payloads(manifest, 1), *buckets(manifest)]
    assert plane.subscriber.statistics()["deltas_refused"] == 1


def test_when_neither_comes_the_old_version_is_kept_as_it_was():
    plane = Plane()
    tensors = plane.pull(plane.publish(0))
    manifest = plane.publish(1)
    plane.bulk.on_fetch = lambda _, array: np.where(np.arange(len(array)) == 9, array ^ 1, array)
    with pytest.raises(WeightError):
        plane.pull(manifest)
    assert weights_digest(tensors) == weights_digest(a_version(0))
    plane.bulk.on_fetch = lambda _, array: array
    plane.pull(manifest)
    assert plane.fetched == payloads(manifest, 1)


def test_a_delta_that_never_comes_leaves_time_for_the_version_whole():
    plane = Plane()
    plane.pull(plane.publish(0))
    manifest = plane.publish(1)
    fetch = plane.bulk.fetch

    async def slow(ref, *, deadline_s):
        if ref.generation in payloads(manifest, 1):
            await asyncio.sleep(deadline_s)
            raise DeadlineExceeded("it did not come")
        return await fetch(ref, deadline_s=deadline_s)

    plane.bulk.fetch = slow
    assert weights_digest(asyncio.run(plane.subscriber.pull(manifest, 0.6))) == manifest.digest


def test_on_one_host_versions_come_whole_nothing_is_held_and_the_reason_is_told_once(caplog):
    caplog.set_level(logging.INFO)
    plane = Plane(local=True)
    for step in range(3):
        manifest = plane.publish(step)
        plane.pull(manifest)
        assert plane.fetched == buckets(manifest)
    assert plane.subscriber.statistics()["base_bytes"] == 0
    assert caplog.text.count("it lies on this host, where a copy is faster") == 1


def test_always_takes_deltas_on_one_host_and_never_takes_none_anywhere():
    plane = Plane("always", local=True)
    never = plane.another("never")
    for step in range(2):
        manifest = plane.publish(step)
        plane.pull(manifest, never)
        assert plane.fetched == buckets(manifest)
        plane.pull(manifest)
    assert plane.fetched == payloads(manifest, 1)


def test_without_zstandard_versions_come_whole_and_always_is_refused(monkeypatch):
    for module in ("delta_publisher", "delta_taker"):
        monkeypatch.setattr(f"cosmos_actor.weight_plane.{module}.unavailable",
                            lambda: "the package zstandard is not installed")
    plane = Plane()
    plane.pull(plane.publish(0))
    manifest = plane.publish(1)
    assert manifest.why_whole == "the package zstandard is not installed"
    plane.pull(manifest)
    assert plane.fetched == buckets(manifest)
    with pytest.raises(WeightError, match="zstandard is not installed.*weights.delta"):
        plane.another("always")


def test_with_one_version_kept_there_are_no_deltas():
    plane = Plane(keep=1)
    plane.publish(0)
    assert plane.publish(1).why_whole == "with weights.keep = 1 the version before is freed first"


@pytest.mark.parametrize("keep", [2, 3])
def test_deltas_live_as_long_as_a_kept_manifest_speaks_of_them(keep, monkeypatch):
    monkeypatch.setattr("cosmos_actor.weight_plane.delta_publisher.MOST_DELTAS", 2)
    plane = Plane(keep=keep)
    manifests = [plane.publish(step) for step in range(6)]
    kept = manifests[-keep:]
    spoken_of = {*sum(map(buckets, kept), []), *sum((payloads(one, 9) for one in kept), [])}
    # what the version before last speaks of is freed by the next publication
    assert spoken_of <= set(plane.bulk.arrays) <= spoken_of | set(payloads(manifests[-keep - 1], 9))
    plane.publisher.close()
    assert plane.bulk.arrays == {}


def test_a_whole_version_has_more_right_to_memory_than_deltas():
    whole = sum(array.nbytes for array in a_version(0).values())
    plane = Plane(budget_bytes=2 * whole + 1000)
    plane.pull(plane.publish(0))
    manifest = plane.publish(1, 0.1)
    assert manifest.why_whole.endswith("does not fit beside it: raise bulk.budget_bytes")
    plane.pull(manifest)
    small = plane.publish(2, 0.1)
    assert small.deltas == []
    roomy = Plane(budget_bytes=2 * whole + 3000)
    for step in range(6):
        assert roomy.publish(step, 0.05).nbytes == whole
    with pytest.raises(BulkFull):
        Plane(budget_bytes=whole // 2).publish(0)


def test_digests_from_the_device_are_taken_as_they_are():
    plane = Plane()
    model = a_version(0)
    plane.pull(plane.publisher.publish(version(0), model, tensor_digests(model)))
    model = a_version(1)
    manifest = plane.publisher.publish(version(1), model, tensor_digests(model))
    assert manifest.digest == weights_digest(model)
    plane.pull(manifest)
    assert plane.fetched == payloads(manifest, 1)


def test_deltas_that_do_not_follow_one_another_are_refused_before_anything_is_fetched():
    plane = Plane()
    plane.publish(0)
    plane.publish(1)
    manifest = plane.publish(2)
    for deltas in (manifest.deltas[::-1], manifest.deltas[:1]):
        with pytest.raises(ManifestInvalid, match="deltas? (do not follow one another|leads elsewhere)"):
            Manifest(manifest.version, manifest.digest, manifest.tensors, manifest.buckets, deltas).check()


@pytest.mark.parametrize(("use", "host", "made"), [
    ("auto", "127.0.0.1", False), ("auto", "localhost", False), ("auto", "::1", False), ("auto", "0.0.0.0", True),
    ("auto", "10.0.0.7", True), ("auto", "head.example", True), ("never", "10.0.0.7", False),
    ("always", "127.0.0.1", True)])
def test_deltas_are_made_where_somebody_may_read_over_a_network(use, host, made):
    assert worth_making(use, host) == made
