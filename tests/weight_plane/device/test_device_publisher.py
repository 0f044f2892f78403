"""The last versions can be pulled from where their snapshots lie; the oldest goes when its memory is needed."""

from __future__ import annotations

import threading

import pytest

from cosmos_actor.bus.identity import Identity, new_incarnation
from cosmos_actor.weight_plane.errors import VersionNotNewer, WeightError
from cosmos_actor.weight_plane.version import Version

torch = pytest.importorskip("torch")
from cosmos_actor.trainer.device_snapshots import DeviceSnapshots  # noqa: E402
from cosmos_actor.weight_plane.device_publisher import DevicePublisher  # noqa: E402
from cosmos_actor.weight_plane.flat_layout import layout_of  # noqa: E402
from cosmos_actor.weight_plane.flat_pool import FlatPool, NoFreeBuffer  # noqa: E402
from cosmos_actor.weight_plane.flat_store import FlatStore  # noqa: E402

from .models import torch_model  # noqa: E402


class Yard:
    """A publisher, and the leases that a server would serve."""

    def __init__(self, **options) -> None:
        self.pool = FlatPool(torch.device("cpu"), bucket_bytes=1 << 20)
        self.store = FlatStore(Identity("run", "policy", "policy-0", new_incarnation()), self.pool)
        self.publisher = DevicePublisher(self, self.pool, **options)
        self.snapshots = DeviceSnapshots(self.pool)

    def lease(self, hold):
        return self.store.lease(hold, "raw://127.0.0.1:1?device=GPU-1")

    def release(self, refs):
        self.store.release(refs)

    def publish(self, step: int, seed: int | None = None):
        self.publisher.make_room(0.2)
        snapshot = self.snapshots.take(torch_model(step if seed is None else seed))
        try:
            return self.publisher.publish(Version("run", 0, step), snapshot.arrays())
        finally:
            snapshot.release()

    def kept(self):
        return self.publisher.statistics()["kept"]

    def read(self, manifest):
        return self.store.reading(manifest.buckets[0].generation)


def test_the_manifest_says_where_every_tensor_lies():
    manifest = Yard().publish(1)
    manifest.check()
    layout = layout_of(manifest)
    assert layout is not None and layout.nbytes == sum(ref.nbytes for ref in manifest.buckets)
    assert manifest.why_whole and len({ref.token for ref in manifest.buckets}) == len(manifest.buckets) > 1


@pytest.mark.parametrize(("keep", "kept"), [(1, ["0.4"]), (2, ["0.3", "0.4"]), (9, ["0.3", "0.4"])])
def test_the_newest_versions_are_kept_as_many_as_there_is_memory_for(keep, kept):
    yard = Yard(keep=keep)
    manifests = [yard.publish(step) for step in (1, 2, 3, 4)]
    assert yard.kept() == kept
    with yard.read(manifests[0]) as gone, yard.read(manifests[3]) as there:
        assert gone is None and len(there) == manifests[3].buckets[0].nbytes
    yard.publisher.close()
    assert yard.kept() == [] and yard.publisher.newest is None and yard.pool.has_room()


def test_what_is_being_read_is_not_written_over_and_the_newest_is_never_freed_for_it():
    yard = Yard()
    first = yard.publish(1)
    with yard.read(first) as found:
        before = found.tensor.clone()
        yard.publish(2)
        with pytest.raises(NoFreeBuffer, match="readers have held"):
            yard.publish(3)
        assert yard.kept() == ["0.2"] and torch.equal(found.tensor, before)
        assert yard.store.freed(first.buckets[0].generation), "who gives it sees that it is to stop"
    yard.publish(3)
    assert yard.kept() == ["0.2", "0.3"]


def test_room_is_made_only_after_what_is_being_published_can_be_pulled(monkeypatch):
    yard = Yard()
    yard.publish(1)
    begun, go_on = threading.Event(), threading.Event()
    lease = yard.lease
    yard.lease = lambda hold: (begun.set(), go_on.wait(20.0), lease(hold))[2]
    publishing = threading.Thread(target=yard.publish, args=(2,))
    publishing.start()
    assert begun.wait(20.0)
    making_room = threading.Thread(target=yard.publisher.make_room)
    making_room.start()
    making_room.join(0.1)
    assert making_room.is_alive()
    go_on.set()
    making_room.join(20.0)
    publishing.join(20.0)
    assert yard.kept() == ["0.2"] and yard.pool.has_room()


def test_versions_only_grow_and_one_that_is_refused_keeps_no_memory():
    yard = Yard()
    yard.publish(2)
    for _ in range(3):
        with pytest.raises(VersionNotNewer):
            yard.publish(2)
    assert yard.publisher.newest.version.step == 2
    with pytest.raises(WeightError, match=r"weights\.keep"):
        Yard(keep=0)


def test_only_bytes_that_were_published_are_written_where_others_lie():
    yard = Yard()
    manifest = yard.publish(1)
    with yard.read(manifest) as found:
        found.tensor[7] ^= 1
    assert yard.publisher.damaged(manifest) == ["embed"]
    other = yard.snapshots.take(torch_model(2))
    assert yard.publisher.put_right(manifest, other.arrays()) == []
    other.release()
    same = yard.snapshots.take(torch_model(1))
    assert yard.publisher.put_right(manifest, same.arrays()) == ["embed"]
    assert yard.publisher.digest_now(manifest) == manifest.digest and yard.publisher.damaged(manifest) == []
