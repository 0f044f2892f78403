"""Adapters that the tests and what they start in vLLM's environment make alike."""

from __future__ import annotations

import numpy as np

from cosmos_actor.roles.vllm_base import Base, put_adapter
from cosmos_actor.trainer.adapter import BASE_DIGEST
from cosmos_actor.trainer.model_weights import named_tensors
from cosmos_actor.trainer.models import skeleton
from cosmos_actor.trainer.settings import LoraSettings, TrainerSettings

LORA = LoraSettings(rank=3, alpha=5.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
"""k_proj and gate_proj, which vLLM joins with some of these, have none."""


def trained(name: str) -> TrainerSettings:
    return TrainerSettings(model=name, lora=LORA)


def adapter(name: str, seed: int) -> dict[str, np.ndarray]:
    """Of version `seed`, large enough that another is another distribution."""
    model = skeleton(name)
    put_adapter(model, LORA, Base(trained(name)).digest)
    random = np.random.default_rng(seed)
    return {key: tensor.numpy().copy() if key == BASE_DIGEST
            else random.normal(0, 0.5, tuple(tensor.shape)).astype(np.float32)
            for key, tensor in named_tensors(model).items()}
