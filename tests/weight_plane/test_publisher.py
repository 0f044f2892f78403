"""What the publisher promises."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.errors import BulkFull
from cosmos_actor.bus.identity import Identity, new_incarnation
from cosmos_actor.bus.schema import decode, encode
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.errors import ForeignRun, ManifestInvalid, VersionNotNewer, WeightError
from cosmos_actor.weight_plane.manifest import Manifest, TensorEntry
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.version import Version

from .memory_bulk import MemoryBulk
from .test_digest import a_model


def version(step: int, epoch: int = 0, run: str = "run") -> Version:
    return Version(run, epoch, step)


def test_a_manifest_lists_every_tensor_and_travels():
    manifest = WeightPublisher(MemoryBulk()).publish(version(3), a_model())
    arrived = decode(*encode(manifest))
    arrived.check()
    assert arrived == manifest and str(arrived.version) == "0.3"
    assert arrived.digest == weights_digest(a_model())
    assert [(entry.name, entry.shape) for entry in arrived.tensors] == [(n, a.shape) for n, a in a_model().items()]
    assert len(arrived.buckets) == 1


def test_small_tensors_share_buckets_and_a_large_one_has_its_own():
    bulk = MemoryBulk()
    tensors = {f"t{number}": np.full(100, number, np.uint8) for number in range(5)}
    tensors["large"] = np.arange(1000, dtype=np.uint8)
    tensors["last"] = np.ones(10, np.uint8)
    manifest = WeightPublisher(bulk, bucket_bytes=300).publish(version(0), tensors)
    manifest.check()
    assert [entry.bucket for entry in manifest.tensors] == [0, 0, 1, 1, 2, 3, 4]
    assert all(entry.offset % 64 == 0 for entry in manifest.tensors)
    buckets = [bulk.arrays[ref.generation] for ref in manifest.buckets]
    for entry in manifest.tensors:
        assert np.array_equal(entry.view(buckets[entry.bucket]), tensors[entry.name])


def test_versions_only_grow_by_epoch_then_step():
    publisher = WeightPublisher(MemoryBulk())
    publisher.publish(version(5), a_model())
    for older in (version(5), version(4)):
        with pytest.raises(VersionNotNewer, match=r"is not newer than 0.5, which the publisher has"):
            publisher.publish(older, a_model())
    with pytest.raises(ForeignRun):
        publisher.publish(version(6, run="other"), a_model())
    publisher.publish(version(2, epoch=1), a_model())
    with pytest.raises(VersionNotNewer):
        publisher.publish(version(9, epoch=0), a_model())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_versions_are_kept_and_older_ones_freed(keep):
    bulk = MemoryBulk()
    publisher = WeightPublisher(bulk, keep=keep)
    manifests = [publisher.publish(version(step), a_model(step)) for step in range(5)]
    held = {ref.generation for manifest in manifests[-keep:] for ref in manifest.buckets}
    assert set(bulk.arrays) == held
    assert publisher.newest == manifests[-1]
    assert publisher.statistics()["kept"] == [f"0.{step}" for step in range(5 - keep, 5)]
    publisher.close()
    assert bulk.arrays == {}


def test_keep_must_be_at_least_one():
    with pytest.raises(WeightError, match="weights.keep"):
        WeightPublisher(MemoryBulk(), keep=0)


def test_a_version_that_does_not_fit_names_the_settings_and_leaves_nothing():
    tensors = {f"t{number}": np.zeros(100, np.uint8) for number in range(4)}
    bulk = MemoryBulk(budget_bytes=600)
    publisher = WeightPublisher(bulk, bucket_bytes=100)
    publisher.publish(version(0), tensors)
    with pytest.raises(BulkFull, match="budget_bytes above 32768, for 2 as large, or lower weights.keep") as raised:
        publisher.publish(version(1), tensors)
    assert raised.value.setting == "bulk.budget_bytes"
    assert bulk.used_bytes == 400 and publisher.newest.version == version(0)


def test_the_old_version_makes_room_before_the_new_one_comes():
    tensors = {"t": np.zeros(100, np.uint8)}
    publisher = WeightPublisher(MemoryBulk(budget_bytes=200))
    for step in range(4):
        publisher.publish(version(step), tensors)


def test_what_can_not_travel_is_refused_by_name():
    publisher = WeightPublisher(MemoryBulk())
    with pytest.raises(ManifestInvalid, match="no tensors"):
        publisher.publish(version(0), {})
    with pytest.raises(ManifestInvalid, match="tensor when is datetime64"):
        publisher.publish(version(0), {"when": np.zeros(2, "datetime64[s]")})
    publisher.publish(version(0), a_model())


def broken(manifest: Manifest, **changes: object) -> Manifest:
    first = TensorEntry(**{**vars(manifest.tensors[0]), **changes})
    return Manifest(manifest.version, manifest.digest, [first, *manifest.tensors[1:]], manifest.buckets)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digest": bytes(32)}, "digest is not the digest of its tensors"),
        ({"name": "other"}, "digest is not the digest of its tensors"),
        ({"name": "norm"}, "one name twice"),
        ({"offset": 1 << 20}, "ends outside its bucket"),
        ({"offset": -1}, "ends outside its bucket"),
        ({"bucket": 1}, "lie in buckets"),
        ({"nbytes": 61}, "has no 61 bytes as float32"),
        ({"shape": (-5, -3)}, "has no 60 bytes"),
        ({"dtype": "float8"}, "has no 60 bytes as float8"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(changes, reason):
    manifest = WeightPublisher(MemoryBulk()).publish(version(0), a_model())
    with pytest.raises(ManifestInvalid, match=reason):
        broken(manifest, **changes).check()


def test_the_budget_that_is_named_is_enough_for_the_kept_versions_and_the_reference():
    model = {f"t{number}": np.zeros(MIB + 13, np.uint8) for number in range(5)}

    def publish_with(budget_bytes: int) -> None:
        store = BulkStore(Identity("run", "policy", "policy-0", new_incarnation()), BulkSettings(
            budget_bytes=budget_bytes))
        try:
            references = WeightPublisher(store, keep=1, in_budget=3)
            versions = WeightPublisher(store, keep=2, in_budget=3)
            references.publish(version(0), model)
            for step in range(6):
                versions.publish(version(step), model)
        finally:
            store.close()

    for too_little in (MIB, 7 * MIB, 12 * MIB):
        with pytest.raises(BulkFull, match="3 as large") as raised:
            publish_with(too_little)
        named = int(re.search(r"bulk.budget_bytes above (\d+)", raised.value.text).group(1))
        publish_with(named + 1)
        with pytest.raises(BulkFull):
            publish_with(named - 4096)
