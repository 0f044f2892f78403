"""How rollouts compute, whoever does: what of it is a setting. Importable without torch and without vLLM."""

from __future__ import annotations

from typing import Literal

from cosmos_actor.actors.settings import Settings, setting


class EngineSection(Settings):
    """Of the section `rollout`."""

    gpu_memory: float = setting(
        0.4, "share of a GPU's memory that rollout.engine = \"vllm\" takes for weights and cache together; what the "
        "policy needs on the same GPU is beside it", unit="of the GPU", gt=0.0, lt=1.0, resumable=True)
    cuda_graphs: bool = setting(
        True, "on a GPU, steps that give each sequence a token are replayed as one CUDA graph in the place of hundreds "
        "of launches; false = start sooner, and sample slower")
    quantization: Literal["none", "fp8"] = setting(
        "none", "fp8 = the matrices of linear layers are rounded to e4m3, a scale for each output: half the memory, "
        "and log-probs further from the trainer's (mismatch/*). vllm on a GPU computes in fp8; torch only rounds")
