"""The rollout's side: gives a version to all workers of its vLLM, each its own part, and says what they then hold.

    tensors (verified) ──cut by the plan──> shared memory, a manifest a worker ──> start, update, finish ──> digests
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.identity import Identity, new_incarnation
from cosmos_actor.roles.engine import WeightsLost, WeightsRefused
from cosmos_actor.roles.vllm_plugin import NAME, register
from cosmos_actor.roles.vllm_plugin.lives import end_with_workers
from cosmos_actor.roles.vllm_plugin.names import forget_names, mark_names
from cosmos_actor.roles.vllm_plugin.taking import manifest_text
from cosmos_actor.weight_plane.device_digest import array_of
from cosmos_actor.weight_plane.digest import combined_digest
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.publisher import BUCKET_BYTES, WeightPublisher
from cosmos_actor.weight_plane.reshard import (
    Box,
    Destination,
    Held,
    Mesh,
    Need,
    pieces_of,
    plan_copies,
    shape_of,
    size,
    whole,
)
from cosmos_actor.weight_plane.version import STEP_BITS, Version

TAKE_WITHIN_S = 120.0
"""For workers to copy their parts out of shared memory of their own host, and to verify them."""
SPARE_BYTES = 4 << 20
"""Of shared memory beside the tensors: buckets begin on pages."""


class Rpc(Protocol):
    """LLM.collective_rpc, or what is like it: asks every worker, and gives their answers by rank."""

    def __call__(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]: ...


def engine_arguments(tensor_parallel: int) -> dict[str, Any]:
    """What vLLM is to be started with, for `PluginLoader` to load it."""
    from vllm.config import WeightTransferConfig

    register()
    mark_names()
    return {"tensor_parallel_size": tensor_parallel, "distributed_executor_backend": "mp",
            "worker_extension_cls": "cosmos_actor.roles.vllm_plugin.worker.Extension",
            "weight_transfer_config": WeightTransferConfig(backend=NAME)}


class PluginLoader:
    """A version is held by every worker of one vLLM or refused by all; its digest is believed part by part."""

    def __init__(self, rpc: Rpc, set_version: Callable[[str], None], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """shapes: of the whole tensors. Raises NotFoundInVllm when vLLM keeps one of them nowhere."""
        self._rpc, self._set_version = rpc, set_version
        self._identity = Identity("vllm", "rollout", "vllm-loader", new_incarnation())
        self._rpc("init_weight_transfer_engine", args=({
            "run_id": self._identity.run_id, "shapes": {name: list(shape) for name, shape in shapes.items()},
            "tell": True},))
        self._held = {name: Held(tuple(shape), None) for name, shape in shapes.items()}
        self._sent: list[dict[str, bytes]] = []
        self._digest = ""
        self._workers = [_destination(boxes) for boxes in rpc("cosmos_boxes")]
        rpc("cosmos_forget_names")
        forget_names()
        end_with_workers()

    def load(self, tensors: Mapping[str, torch.Tensor], version: int, digest: str) -> str:
        """`digest`, when every worker computes with its part of exactly these tensors, whose digest it is.

        Raises WeightsRefused when no worker has touched anything, WeightsLost when one has.
        """
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}  # from there workers take their parts
        named = Version(self._identity.run_id, version >> STEP_BITS, version & (1 << STEP_BITS) - 1)
        store = BulkStore(self._identity, BulkSettings(budget_bytes=self._room(tensors)))
        try:
            manifests = self._publish(store, named, tensors)
            self._hand_over(named, manifests)
        finally:
            store.close()
        self._sent = [_digests(manifest) for manifest in manifests]
        self._digest = digest
        self._set_version(str(version))
        return digest

    def read_back(self) -> str:
        """The digest of what the workers compute with now: the one that was loaded, or one that nothing else has."""
        held = self._rpc("cosmos_read_back")
        if held == self._sent:
            return self._digest
        return combined_digest({f"{rank}/{name}": part for rank, own in enumerate(held) for name, part in own.items()})

    def _publish(self, store: BulkStore, version: Version, tensors: Mapping[str, torch.Tensor]) -> list[Manifest]:
        plan = plan_copies(self._held, Mesh(1, 1), self._workers)
        manifests = []
        for rank in range(len(self._workers)):
            copies = plan.get((0, rank), [])
            parts = {copy.tensor: array_of(piece)
                     for copy, piece in zip(copies, pieces_of(tensors, copies), strict=True)}
            manifests.append(WeightPublisher(store, keep=1).publish(version, parts))
        return manifests

    def _hand_over(self, version: Version, manifests: list[Manifest]) -> None:
        self._rpc("start_weight_update")
        self._rpc("update_weights", args=([
            {"manifest": manifest_text(manifest), "deadline_s": TAKE_WITHIN_S} for manifest in manifests],))
        refused = [report["problem"] for report in self._rpc("cosmos_report") if report["problem"]]
        self._rpc("finish_weight_update")
        if refused:
            raise WeightsRefused(f"version {version} was not taken by vLLM's {refused[0]}")
        for rank, (report, manifest) in enumerate(zip(self._rpc("cosmos_report"), manifests, strict=True)):
            if report["problem"] or report["version"] != str(version) or report["held"] != _digests(manifest):
                raise WeightsLost(f"version {version}: vLLM's worker {rank} computes with something else: "
                                  f"{report['problem'] or 'its digests are not those of its part'}")

    def _room(self, tensors: Mapping[str, torch.Tensor]) -> int:
        every = sum(size(need.source) * tensors[need.tensor].itemsize for own in self._workers for need in own.needs)
        return every + every // 4 + len(self._workers) * (SPARE_BYTES + BUCKET_BYTES)


def _digests(manifest: Manifest) -> dict[str, bytes]:
    return {entry.name: entry.digest for entry in manifest.tensors}


def _destination(boxes: Mapping[str, Box]) -> Destination:
    """A worker that is sent its part of each tensor under the tensor's own name; vLLM joins them itself."""
    made = Destination()
    for name, box in boxes.items():
        if size(box):
            made.parameters[name] = shape_of(box)
            made.needs.append(Need(name, box, name, whole(shape_of(box))))
    return made
