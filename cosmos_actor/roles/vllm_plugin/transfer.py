"""The weight-transfer engine that vLLM makes in each of its workers. It needs vLLM to be imported.

    taken   verified in this process's own memory, not loaded
    held    what the layers compute with, read back through their kernels: set last, cleared first
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from cosmos_actor.roles.vllm_in_place import InPlace
from cosmos_actor.roles.vllm_plugin.taking import Taker, manifest_of
from cosmos_actor.roles.vllm_versions import NoTrainerSide, own_part
from cosmos_actor.roles.vllm_weights import Place, Small, held_digests, pack_heads, places, small_numbers
from cosmos_actor.weight_plane.device_digest import array_of
from cosmos_actor.weight_plane.digest import tensor_digest
from cosmos_actor.weight_plane.errors import ManifestInvalid
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.reshard import Box, index, shape_of, size
from cosmos_actor.weight_plane.version import Version


class NotTaken(RuntimeError):
    """No worker has loaded anything: the version before is in place, and serves."""


class HalfLoaded(RuntimeError):
    """A worker failed between its first parameter and its proof: nothing it computes is of any version."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Whose versions, and how they are taken."""

    run_id: str
    keys: str = ""
    """Path of the key file for publishers of other hosts; empty: only those of this host are read."""
    shapes: dict[str, list[int]] | None = None
    """Of the whole tensors, when each worker's manifest has its own parts only. None: a manifest has whole tensors."""
    tell: bool = False
    """Keep problems for `report` in the place of raising them. vLLM's executor, when one of several workers raises,
    leaves the answers of the others in their queues, and takes them for the answers to what it asks next."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One version. vLLM gives each worker its own of a list, or all the same."""

    manifest: str
    """See `manifest_text`."""
    deadline_s: float = 60.0


@dataclass
class Taken:
    version: Version
    parts: dict[str, torch.Tensor]
    shapes: dict[str, torch.Size]
    places: dict[str, Place]


class CosmosWeightTransferEngine(NoTrainerSide, WeightTransferEngine[InitInfo, UpdateInfo]):
    """A version is loaded by all workers or by none, and only after each has verified all bytes of its own part."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _info: InitInfo | None = None
    _taker: Taker | None = None
    _taken: Taken | None = None
    _places: dict[str, Place] | None = None
    _small: dict[str, Small] | None = None
    _in_place: InPlace | None = None
    """On a GPU, where parameters are what layers compute with."""
    problem = ""
    """Of the update under way or the last one."""
    version: Version | None = None
    held: dict[str, bytes] | None = None
    """Digest of each part that the layers compute with; None before the first version, and after HalfLoaded."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        self._info, self._taker = init_info, Taker(init_info.run_id, init_info.keys)

    def start_weight_update(self) -> None:
        """Nothing is touched yet."""
        self._taken, self.problem = None, ""

    def update_weights(self, update_info: Any) -> None:
        """As the base's, which would wait for an accelerator also where there is none."""
        self.receive_weights(self.parse_update_info(own_part(update_info, get_tp_group().rank_in_group)))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take and verify. Raises NotTaken on every worker when any of them could not."""
        own = ""
        try:
            if self._taken is not None:
                raise ManifestInvalid("a second manifest within one update")
            self._taken = self._take(update_info)
        except Exception as error:  # of any kind: the others wait for this worker's word
            own = f"{type(error).__name__}: {error}"
        self.problem = _first_problem(own)
        if self.problem:
            self._taken = None
            self._raise(NotTaken(self.problem))

    def finish_weight_update(self) -> None:
        """Load what was taken and read it back. Raises HalfLoaded when this worker then computes with anything else."""
        taken, self._taken = self._taken, None
        if taken is None:
            self.problem = self.problem or "nothing was taken: update_weights comes first"
            self._raise(NotTaken(self.problem))
            return
        self.held = None
        try:
            held = self._load(taken)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            self._raise(HalfLoaded(self.problem))
            return
        self.version, self.held = taken.version, held

    def shutdown(self) -> None:
        if self._taker is not None:
            self._taker.close()
            self._taker = None

    def boxes(self) -> dict[str, Box]:
        """What of each whole tensor this worker needs. Raises NotFoundInVllm."""
        return {name: place.box for name, place in self._find_places(self._shapes(None)).items()}

    def report(self) -> dict[str, Any]:
        """The problem of the last update, the version that this worker computes with, and its parts' digests."""
        return {"problem": self.problem, "version": None if self.held is None else str(self.version),
                "held": self.held}

    def read_back(self) -> dict[str, bytes]:
        """The digest of each part that the layers compute with now."""
        if self._in_place is not None:
            return self._in_place.digests()
        return held_digests(self.model, self._places or {}, self._small or {})

    def _raise(self, error: Exception) -> None:
        if self._info is None or not self._info.tell:
            raise error

    def _take(self, info: UpdateInfo) -> Taken:
        if self._info is None or self._taker is None:
            raise ManifestInvalid("init_weight_transfer_engine comes first")
        manifest = manifest_of(info.manifest)
        self._taker.check(manifest, self.version)
        shapes = self._shapes(manifest)
        found = self._find_places(shapes)
        parts = self._taker.take(manifest, {name: place.box for name, place in found.items()}, info.deadline_s)
        missing = sorted(name for name, place in found.items() if size(place.box) and name not in parts)
        if missing or parts.keys() - found.keys():
            raise ManifestInvalid(f"version {manifest.version} has not the tensors of this model: "
                                  f"{(missing or sorted(parts.keys() - found.keys()))[0]}")
        return Taken(manifest.version, {name: _fitting(name, part, found[name]) for name, part in parts.items()},
                     shapes, found)

    def _shapes(self, manifest: Manifest | None) -> dict[str, torch.Size]:
        if self._info is not None and self._info.shapes is not None:
            return {name: torch.Size(shape) for name, shape in self._info.shapes.items()}
        if manifest is None:
            raise ManifestInvalid("the shapes of the whole tensors were not told")
        return {entry.name: torch.Size(entry.shape) for entry in manifest.tensors}

    def _find_places(self, shapes: Mapping[str, torch.Size]) -> dict[str, Place]:
        if self._places is None:
            self._places = places(self.model, shapes)
        return self._places

    def _load(self, taken: Taken) -> dict[str, bytes]:
        """Into the layers, then the proof."""
        if self.device.type == "cpu":
            self._reload(taken)
        else:
            self._in_place = self._in_place or InPlace(
                self.model, taken.places, {name: part.dtype for name, part in taken.parts.items()})
            self._in_place.write(taken.parts)
        held = self.read_back()
        for name, part in taken.parts.items():
            if held[name] != tensor_digest(array_of(part)):
                raise HalfLoaded(f"version {taken.version}: vLLM was given another {name} than it computes with")
        return held

    def _reload(self, taken: Taken) -> None:
        """vLLM's layerwise reload with its own loaders."""
        with torch.no_grad():
            initialize_layerwise_reload(self.model)
            self.model.load_weights(_widened(taken))
            finalize_layerwise_reload(self.model, self.model_config)
            pack_heads(self.model)
        self._small = small_numbers(taken.parts)


def _widened(taken: Taken) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors for vLLM's loaders, which cut this worker's part out of them again. The rest is zero pages of the
    kernel's, which take no memory until somebody looks at them."""
    for name, shape in taken.shapes.items():
        box = taken.places[name].box
        part = taken.parts.get(name)
        if part is not None and tuple(part.shape) == tuple(shape):
            yield name, part
            continue
        like = next(iter(taken.parts.values())) if part is None else part
        whole = torch.from_numpy(np.zeros(tuple(shape), array_of(like).dtype)).view(like.dtype)
        if part is not None:
            whole[index(box)] = part
        yield name, whole


def _fitting(name: str, part: np.ndarray, place: Place) -> torch.Tensor:
    if part.shape != shape_of(place.box):
        raise ManifestInvalid(f"{name} came as {list(part.shape)}, this worker's part is {list(shape_of(place.box))}")
    tensor = torch.from_numpy(part)
    tensor = tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
    if not torch.isfinite(tensor).all():
        raise ManifestInvalid(f"{name} has numbers that are not finite, which could not be read back")
    return tensor


def _first_problem(own: str) -> str:
    """The same on all workers that share the model: empty when none of them has a problem."""
    group = get_tp_group()
    if group.world_size == 1:
        return own
    every: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(every, own, group=group.cpu_group)
    return next((f"worker {rank}: {problem}" for rank, problem in enumerate(every) if problem), "")
