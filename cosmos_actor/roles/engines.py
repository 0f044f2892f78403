"""Which rollout engines there are, and what each can not do: known before one is loaded. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from cosmos_actor.roles.sampling import SamplingSettings

EngineName = Literal["torch", "vllm"]
TORCH, VLLM = get_args(EngineName)
ENGINES = {
    TORCH: "cosmos_actor.roles.torch_engine:TorchEngine",
    VLLM: "cosmos_actor.roles.vllm_engine:VllmEngine",
}
SLEEPERS = frozenset({TORCH, VLLM})
"""Those that are an `engine.Sleeper`: the others have their device for themselves, or none."""
VLLM_LEAST_TEMPERATURE = 0.01
"""vLLM takes what is below, and is not 0, for this, and says so in its log only."""


def engine_disagreements(settings: Any) -> Iterator[str]:
    """One line for each thing that a run's settings ask of a rollout engine that can not do it."""
    rollout = settings.rollout
    adapter = settings.policy.lora.rank > 0 and settings.policy.lora.publish == "adapter"
    if rollout.quantization != "none" and adapter:
        yield (f"rollout.quantization = \"{rollout.quantization}\" takes no adapter alone: policy.lora.publish = "
               "\"merged\"")
    if rollout.engine != VLLM:
        if rollout.tensor_parallel > 1:
            yield "rollout.tensor_parallel is for rollout.engine = \"vllm\": leave it at 1, or take that engine"
        return
    if settings.run.grouping == "single":
        yield "rollout.engine = \"vllm\" wants a process of its own: run.grouping = \"per_role\""
    if adapter and rollout.device == "cuda" and settings.policy.publish_dtype == "float32":
        yield ("rollout.device = \"cuda\" with rollout.engine = \"vllm\" takes adapters of policy.publish_dtype = "
               "\"bfloat16\" or \"float16\", or policy.lora.publish = \"merged\"")
    if adapter and rollout.tensor_parallel > 1:
        yield ("rollout.tensor_parallel > 1 takes no adapter alone: policy.lora.publish = \"merged\", or "
               "rollout.tensor_parallel = 1")
    if rollout.quantization != "none":
        yield from _quantised_disagreements(settings)
    if line := vllm_can_not(rollout):
        yield f"{line}: change that, or rollout.engine = \"torch\""


def _quantised_disagreements(settings: Any) -> Iterator[str]:
    rollout = settings.rollout
    wanted = f"rollout.quantization = \"{rollout.quantization}\" with rollout.engine = \"vllm\""
    if rollout.device == "cpu":
        yield f"{wanted} needs a GPU: rollout.device = \"cuda\", or rollout.engine = \"torch\", which rounds alike"
    if rollout.tensor_parallel > 1:
        yield f"{wanted} is for one GPU: rollout.tensor_parallel = 1"
    if settings.policy.publish_dtype != "bfloat16":
        yield f"{wanted} takes bfloat16: policy.publish_dtype = \"bfloat16\""


def vllm_can_not(sampling: SamplingSettings) -> str:
    """What of `sampling` vLLM can not do exactly, as a line; empty when it can.

    Its log-probs are either at temperature 1, or after top-p and top-k.
    """
    if 0 < sampling.temperature < VLLM_LEAST_TEMPERATURE:
        return f"vLLM has no rollout.temperature between 0 and {VLLM_LEAST_TEMPERATURE}"
    if sampling.truncates and sampling.temperature not in (0.0, 1.0):
        return (f"vLLM gives no log-probs at rollout.temperature = {sampling.temperature} that are before "
                "rollout.top_p and rollout.top_k")
    return ""


def vllm_logprobs_mode(sampling: SamplingSettings) -> str:
    """vLLM's name for log-probs at the sampling temperature and before top-p and top-k, where `vllm_can_not` is empty.

    Its processed ones are after temperature, top-p and top-k; its raw ones are before all three.
    """
    return "raw_logprobs" if sampling.truncates else "processed_logprobs"
