"""Versions of a model of random weights, on a GPU, and what transformers makes of them in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cosmos_actor.roles.engine import Completion, GenerateItem
from cosmos_actor.trainer.model_weights import named_tensors
from cosmos_actor.trainer.models import skeleton

HEAD_SPREAD = 3.0
"""nats: of the logits, so that two versions have little in common."""
Answers = list[tuple[GenerateItem, Completion]]


class Versions:
    """A version's weights are a function of its number; each is bfloat16."""

    def __init__(self, name: str, device: str = "cuda") -> None:
        self._skeleton, self._device = skeleton(name, dtype="bfloat16"), device
        self._reference: Any = None
        self._loaded: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def tensors(self, number: int, *, near: bool = False) -> dict[str, torch.Tensor]:
        """near: on the device; otherwise on the host. Activations keep their size through all layers."""
        random = torch.Generator(self._device).manual_seed(number)
        made: dict[str, torch.Tensor] = {}
        for name, like in named_tensors(self._skeleton).items():
            values = torch.randn(like.shape, generator=random, device=self._device)
            if like.ndim == 1:
                values = 1.0 + 0.1 * values
            else:
                values *= (HEAD_SPREAD if "embed" in name else 1.0) / like.shape[1] ** 0.5
            made[name] = values.to(torch.bfloat16) if near else values.to(torch.bfloat16).cpu()
        return made

    def arrays(self, number: int) -> dict[str, np.ndarray]:
        """As a rollout pulls them."""
        return {name: tensor.view(torch.uint16).numpy() for name, tensor in self.tensors(number).items()}

    @torch.inference_mode()
    def off(self, tensors: dict[str, torch.Tensor], answers: Answers, temperature: float = 1.0,
            only: int | None = None) -> dict[str, float]:
        """Largest and mean difference of log-probs from those of `tensors`; `only` of tokens of that version."""
        self._load(tensors)
        every: list[torch.Tensor] = []
        for item, answer in answers:
            chosen = torch.tensor(answer.tokens, device=self._device).long()
            sequence = torch.cat([torch.tensor(item.prompt, device=self._device).long(), chosen])[None]
            logits = self._reference(input_ids=sequence).logits[0, len(item.prompt) - 1 : -1].float()
            right = torch.log_softmax(logits / temperature, -1).gather(1, chosen[:, None])[:, 0]
            found = (right - torch.tensor(answer.logprobs, device=self._device)).abs()
            of_version = torch.tensor(answer.versions, device=self._device)
            every.append(found if only is None else found[of_version == only])
        flat = torch.cat(every)
        return {"max": float(flat.max()), "mean": float(flat.mean()), "tokens": float(len(flat))}

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        if self._reference is None:
            with torch.device(self._device):
                self._reference = type(self._skeleton)(self._skeleton.config).float().eval()
        own = named_tensors(self._reference)
        if tensors is not self._loaded:
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
            self._loaded = tensors


def with_adapter(tensors: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor],
                 scale: float) -> dict[str, torch.Tensor]:
    """W + scale·B·A in float32, by the base's names."""
    merged = {name: tensor.float() for name, tensor in tensors.items()}
    for name, A in adapter.items():
        if ".lora_A." in name:
            own = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            B = adapter[name.replace(".lora_A.", ".lora_B.")]
            merged[own] = merged[own] + scale * (B.float() @ A.float())
    return merged
