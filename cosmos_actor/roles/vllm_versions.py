"""What differs between the versions of vLLM that are driven, 0.26 on GPUs and 0.32 on CPUs: asked of vLLM itself.

| | 0.26 | 0.32 |
|---|---|---|
| the name of the weights held | not kept | `LLMEngine.set_weight_version` |
| `update_weights` of workers | one dictionary for all | each its own of a list |
| a weight-transfer engine | must have `trainer_send_weights` | has it no more |
| names of an adapter's layers | `get_unstacked_mapper` | `get_rename_mapper` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

DECODE_GRAPHS: Mapping[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""`compilation_config`: steps in which every sequence gets one token are CUDA graphs, whole; nothing is compiled by
torch. Prompts are read without graphs."""
FP8 = "fp8_per_channel"
"""`quantization`: e4m3, a scale for each output of a linear layer, and one for each token's activations."""


def version_setter(engine: Any) -> Callable[[str], None]:
    """Tells vLLM's engine what its weights are called, where it keeps that."""
    return getattr(engine, "set_weight_version", None) or (lambda version: None)


def own_part(update: Any, rank: int) -> dict[str, Any]:
    """Of what `update_weights` was given, a dictionary or one for each worker, that of worker `rank`."""
    return update[rank] if isinstance(update, list) else update


def layer_names(model: Any) -> Any:
    """vLLM's mapper from an adapter's layer names to its own, without what it joins; None: they are the same."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for name in ("get_rename_mapper", "get_unstacked_mapper"):
        if mapper is not None and hasattr(mapper, name):
            return getattr(mapper, name)()
    return mapper


class NoTrainerSide:
    """The half of a weight-transfer engine that a trainer would call, had it vLLM; older versions ask for it."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("versions come from the weight plane: see cosmos_actor.weight_plane.publisher")
