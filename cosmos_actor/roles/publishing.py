"""How the policy publishes its versions: out of the host's memory, or from the GPU that it trains on.

    host     snapshot in pinned memory ──> bulk plane ──> shared memory, streams, deltas, fan-out
    device   snapshot in a flat on the GPU, which is what others pull ──> nccl, cuda_ipc; streams where neither serves

Of a version on the device there is no second copy. What lies damaged there is written anew from the weights, as long as
the policy has not trained on from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cosmos_actor.roles.outbox import Outbox
from cosmos_actor.weight_plane.delta_publisher import is_loopback, worth_making
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.on_the_plane import digest_on_the_plane, put_right
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.transports.directory_source import written_too
from cosmos_actor.weight_plane.transports.interface import TO_GPUS
from cosmos_actor.weight_plane.version import Version


def from_device(settings: Any, device: str) -> tuple[bool, str]:
    """(whether versions are published from the device that the policy trains on, why). `device`: "cpu" or "cuda"."""
    wanted, rollout = settings.weights, settings.rollout
    if device != "cuda":
        return False, f"the policy trains on the {device}"
    if settings.run.experience != "text" or settings.run.grouping != "per_role":
        return False, "only language models in processes of their own are published from a GPU"
    if wanted.transport in TO_GPUS:
        return True, f"weights.transport = {wanted.transport}"
    if wanted.transport != "auto" or wanted.delta == "always":
        return False, f"weights.transport = {wanted.transport}, weights.delta = {wanted.delta}"
    if rollout.count == 0 or rollout.device == "cpu":
        return False, f"rollout.count = {rollout.count}, rollout.device = {rollout.device}"
    if not is_loopback(settings.bus.host):
        return False, f"rollouts of other hosts may join at bus.host = {settings.bus.host}"
    return True, "every rollout is on this host"


class HostPublishing:
    """Versions of the host's memory; the trainer's snapshots lie in pinned memory."""

    mends_from_weights = False
    """Whether `mend` belongs into the thread that trains, or into the outbox's."""

    def __init__(self, context: Any, store: Any, in_budget: int) -> None:
        wanted = context.settings.weights
        self._store = context.bulk_store
        self._publisher = WeightPublisher(store, keep=wanted.keep, in_budget=in_budget,
                                          deltas=worth_making(wanted.delta, context.settings.bus.host))
        self.outbox = Outbox(written_too(self._publisher.publish, wanted.directory, context.identity.run_id,
                                         wanted.keep))

    @property
    def newest(self) -> Manifest | None:
        return self._publisher.newest

    def make_room(self) -> None:
        """For the next snapshot."""
        self.outbox.make_room()

    def digest_now(self, manifest: Manifest) -> str:
        """Of the bytes that others pull now."""
        return digest_on_the_plane(self._store, manifest)

    def mend(self, manifest: Manifest, trainer: Any, step: int) -> tuple[list[str], str]:
        """Put right what lies damaged, out of the newest snapshot: the names of those tensors, and why not others."""
        def compare(version: Version, arrays: Mapping[str, Any]) -> list[str]:
            return put_right(self._store, manifest, arrays) if version == manifest.version else []

        return self.outbox.with_newest(compare) or [], ""

    def close(self) -> None:
        self.outbox.close()


class DevicePublishing:
    """Versions of the device's memory, and no others: see `weight_plane.device_publisher`."""

    mends_from_weights = True

    def __init__(self, context: Any, device: Any) -> None:
        from cosmos_actor.weight_plane.device_publisher import DevicePublisher
        from cosmos_actor.weight_plane.flat_pool import FlatPool
        from cosmos_actor.weight_plane.transports.flat_giving import FlatServer
        from cosmos_actor.weight_plane.transports.handles import shareable
        from cosmos_actor.weight_plane.transports.pair import gpu

        wanted, store = context.settings.weights, context.bulk_store
        self._pool = FlatPool(device, allocate=shareable)
        self._server = FlatServer(context.identity, self._pool, lambda: host_of(store.address), gpu() or str(device))
        self._publisher = DevicePublisher(self._server, self._pool, keep=wanted.keep)
        self.outbox = Outbox(written_too(self._publisher.publish, wanted.directory, context.identity.run_id,
                                         wanted.keep, _on_host))

    @property
    def newest(self) -> Manifest | None:
        return self._publisher.newest

    def prepare(self, trainer: Any) -> None:
        """Let the trainer's snapshots lie where they are published."""
        from cosmos_actor.trainer.device_snapshots import DeviceSnapshots

        trainer.snapshots_by(DeviceSnapshots(self._pool))

    def make_room(self) -> None:
        """For the next snapshot: waits for what is being published, and frees the version before that."""
        self.outbox.make_room()
        self._publisher.make_room()

    def digest_now(self, manifest: Manifest) -> str:
        """Of the bytes that others pull now."""
        return self._publisher.digest_now(manifest)

    def mend(self, manifest: Manifest, trainer: Any, step: int) -> tuple[list[str], str]:
        """Put right what lies damaged, out of another snapshot of the weights, which are those of `step` now: the names
        of those tensors, and why not others."""
        damaged = self._publisher.damaged(manifest)
        if not damaged:
            return [], ""
        if step != manifest.version.step:
            return [], (f"weights {manifest.version} lie damaged on the GPU ({damaged[0]}), and the policy is at step"
                        f" {step}: they can not be made anew, the next version takes their place")
        self._publisher.make_room()
        snapshot = trainer.snapshot()
        try:
            mended = self._publisher.put_right(manifest, snapshot.arrays())
        finally:
            snapshot.release()
        left = sorted(set(damaged) - set(mended))
        return mended, f"weights {manifest.version}: {left[0]} is not what it was in the trainer either" if left else ""

    def close(self) -> None:
        self.outbox.close()
        self._server.close()


def host_of(address: str) -> str:
    """Where a bulk server listens; the loopback where none does."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]") or "127.0.0.1"


def _on_host(tensors: Any) -> Mapping[str, Any]:
    """A version on the device as arrays, for a directory."""
    from cosmos_actor.trainer.model_weights import host_copies
    from cosmos_actor.weight_plane.flat import aside

    with aside(tensors.flat.device):
        return host_copies(tensors.items())
