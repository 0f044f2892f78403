"""The base of adapters: what vLLM is to load when it starts, and what versions of an adapter for it look like. No peft.
"""

from __future__ import annotations

from pathlib import Path

import torch

from cosmos_actor.trainer.adapter import ADAPTER, BUFFER
from cosmos_actor.trainer.model_weights import named_tensors
from cosmos_actor.trainer.models import load_model
from cosmos_actor.trainer.settings import LoraSettings, TrainerSettings
from cosmos_actor.weight_plane.device_digest import weights_digest_on


class Base:
    """A model on the host, and its digest as it would be published whole."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._model = load_model(settings.model, seed=settings.seed, dtype=settings.publish_dtype)
        self.tensors = named_tensors(self._model)
        self.digest = weights_digest_on(self.tensors)

    def save(self, folder: Path) -> None:
        """As a directory that vLLM loads."""
        self._model.config.architectures = [type(self._model).__name__]
        self._model.save_pretrained(folder)


def put_adapter(skeleton: torch.nn.Module, lora: LoraSettings, base_digest: str) -> None:
    """Give `skeleton`, on the meta device, an adapter's names, shapes and base: what `fitting` compares offers with."""
    targets = [module for name, module in skeleton.named_modules()
               if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in lora.targets]
    for layer in targets:
        sizes = {"lora_A": (layer.in_features, lora.rank), "lora_B": (lora.rank, layer.out_features)}
        for name, (inputs, outputs) in sizes.items():
            part = torch.nn.Linear(inputs, outputs, bias=False, device="meta", dtype=layer.weight.dtype)
            layer.add_module(name, torch.nn.ModuleDict({ADAPTER: part}))
    digest = torch.frombuffer(bytearray.fromhex(base_digest), dtype=torch.uint8)
    skeleton.register_buffer(BUFFER, digest, persistent=False)
