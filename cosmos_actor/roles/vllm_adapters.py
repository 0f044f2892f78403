"""LoRA adapters alone for vLLM: its base is loaded once, when it starts, and each version is an adapter beside it.

    policy.model ──vLLM's own loader──> base layers, read back: the digest that adapters name as theirs
    a version    ──in memory──────────> A and B of vLLM's LoRA layers, read back and compared

There is one adapter, always under the same number, so sequences in flight go on with the next one as they do with whole
models. vLLM multiplies B by alpha / rank when it takes it; so is what it is compared with.

Legend: I inputs and O outputs of a layer, r the adapter's rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.roles.vllm_packed import Worker
from cosmos_actor.roles.vllm_versions import layer_names
from cosmos_actor.trainer.adapter import BASE_DIGEST, PREFIX
from cosmos_actor.trainer.settings import LoraSettings
from cosmos_actor.weight_plane.device_digest import tensor_digests_on
from cosmos_actor.weight_plane.digest import combined_digest

NAME, NUMBER = "policy", 1
"""vLLM's for the adapter."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM makes room for."""


def room_for(rank: int) -> int:
    """The least of RANKS that an adapter of `rank` fits into. Raises BadValue."""
    if rank > RANKS[-1]:
        raise BadValue(f"policy.lora.rank = {rank}, and vLLM takes adapters of rank {RANKS[-1]} at most: "
                       "policy.lora.publish = \"merged\"", setting="policy.lora.rank")
    return min(room for room in RANKS if room >= rank)


def adapter_request() -> Any:
    """vLLM's LoRARequest for the adapter, which it is given in memory: the path is never opened."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, NUMBER, "in memory")


@dataclass(frozen=True)
class Slot:
    """Where vLLM has one tensor of an adapter."""

    layer: str
    """Of vLLM, which joins some."""
    part: int
    """Among those that are joined."""
    is_a: bool


class Adapters:
    """What is held is the adapter that was given last, on the base that was there first, or nothing is."""

    def __init__(self, worker: Worker, base: Callable[[], str], base_digest: str, lora: LoraSettings) -> None:
        """base: reads back the digest of what vLLM has as the base. Raises BadValue unless it is `base_digest`."""
        self._worker, self._base, self._base_digest, self._lora = worker, base, base_digest, lora
        found = base()
        if found != base_digest:
            raise BadValue(f"vLLM loaded a base with digest {found[:16]} from policy.model, and its files have "
                           f"{base_digest[:16]}", setting="policy.model")
        self._expected: dict[str, bytes] = {}
        self._digest = ""

    def load(self, offered: Mapping[str, torch.Tensor], version: int, digest: str) -> str:
        """See vllm_packed.Loader.load. The base was read back when vLLM started, and is so again by `read_back`."""
        tensors = {name: tensor for name, tensor in offered.items() if name != BASE_DIGEST}
        self._expected, self._digest = self._as_held(tensors), digest
        self._worker(lambda worker: _put(worker, tensors, self._lora))
        return self._named(self._held())

    def read_back(self) -> str:
        """See vllm_packed.Loader.read_back: base and adapter."""
        base, held = self._base(), self._held()
        return self._named(held) if base == self._base_digest else combined_digest({**held, BASE_DIGEST: base.encode()})

    def _named(self, held: Mapping[str, bytes]) -> str:
        """The version's digest, when what is held was made of it, or one that nothing else has."""
        return self._digest if held == self._expected else combined_digest(held)

    def _held(self) -> dict[str, bytes]:
        found: dict[str, bytes] = self._worker(lambda worker: _digests(worker, list(self._expected)))
        return found

    def _as_held(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """The digests of these tensors as vLLM is to have them."""
        scale = self._lora.alpha / self._lora.rank
        return tensor_digests_on({name: tensor if ".lora_A." in name else tensor * scale
                                  for name, tensor in tensors.items()})


def _manager(worker: Any) -> Any:
    return worker.model_runner.lora_manager._adapter_manager  # vLLM has no public way to an adapter in memory


@torch.inference_mode()
def _put(worker: Any, tensors: Mapping[str, torch.Tensor], lora: LoraSettings) -> None:
    """In the place of the adapter before it, by vLLM's own reading of names and its own joining of layers."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = _manager(worker)
    helper = PEFTHelper(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
    own = {name: tensor.clone() for name, tensor in tensors.items()}  # B is multiplied where it is
    made = LoRAModel.from_lora_tensors(NUMBER, own, helper, device="cpu", dtype=manager.lora_config.lora_dtype,
                                       weights_mapper=layer_names(manager.model))
    manager.remove_adapter(NUMBER)
    manager.add_adapter(made)
    manager.activate_adapter(NUMBER)


@torch.inference_mode()
def _digests(worker: Any, names: list[str]) -> dict[str, bytes]:
    """Of the rows of vLLM's LoRA layers that it computes with. What it has not got is missing."""
    manager = _manager(worker)
    if NUMBER not in manager.lora_index_to_id:
        return {}
    at = manager.lora_index_to_id.index(NUMBER)
    rank = manager.get_adapter(NUMBER).rank
    held: dict[str, torch.Tensor] = {}
    for name in names:
        slot = slot_of(name, getattr(manager.model, "packed_modules_mapping", {}))
        layer = manager.modules.get(slot.layer)
        if layer is not None:
            stacked = (layer.lora_a_stacked if slot.is_a else layer.lora_b_stacked)[slot.part][at, 0]
            held[name] = stacked[:rank] if slot.is_a else stacked[:, :rank]
    return tensor_digests_on(held)


def slot_of(name: str, joined: Mapping[str, list[str]]) -> Slot:
    """Of a tensor by peft's name. joined: vLLM's layer -> the layers that it is made of."""
    path, _, rest = name.removeprefix(PREFIX).partition(".lora_")
    parent, _, own = path.rpartition(".")
    for layer, parts in joined.items():
        if own in parts:
            return Slot(f"{parent}.{layer}", parts.index(own), rest.startswith("A"))
    return Slot(path, 0, rest.startswith("A"))
