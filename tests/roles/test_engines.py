"""What each rollout engine can not do is one line, before anything starts."""

from __future__ import annotations

import numpy as np
import pytest

from cosmos_actor.actors.errors import UserError
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.roles.engine import GenerateItem
from cosmos_actor.roles.engines import vllm_logprobs_mode
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.vllm_steps import seed_of


@pytest.mark.parametrize(("settings", "line"), [
    (["rollout.temperature=0.7", "rollout.top_p=0.9"], "no log-probs at rollout.temperature = 0.7 that are before"),
    (["rollout.temperature=0.7", "rollout.top_k=5"], "change that, or rollout.engine = \"torch\""),
    (["rollout.temperature=0.001"], "no rollout.temperature between 0 and 0.01"),
    (["run.grouping=single"], "wants a process of its own"),
])
def test_what_vllm_can_not_do_is_refused(settings: list[str], line: str) -> None:
    resolve("grpo-arithmetic", settings)
    with pytest.raises(UserError, match=line):
        resolve("grpo-arithmetic", ["rollout.engine=vllm", *settings])


@pytest.mark.parametrize("settings", [
    ["rollout.temperature=0.7"], ["rollout.top_p=0.9"], ["rollout.temperature=0", "rollout.top_k=5"]])
def test_what_vllm_can_do_is_not(settings: list[str]) -> None:
    resolve("grpo-arithmetic", ["rollout.engine=vllm", *settings])


LORA, MERGED = ["policy.lora.rank=4"], ["policy.lora.rank=4", "policy.lora.publish=merged"]
BFLOAT16, ON_GPU = ["policy.publish_dtype=bfloat16"], ["rollout.quantization=fp8", "rollout.device=cuda"]


@pytest.mark.parametrize(("settings", "line"), [
    ([*LORA, "rollout.device=cuda"], "takes adapters of policy.publish_dtype = \"bfloat16\""),
    ([*LORA, "rollout.tensor_parallel=2"], "takes no adapter alone: policy.lora.publish = \"merged\""),
    (["rollout.quantization=fp8", *BFLOAT16, "rollout.device=cpu"], "needs a GPU: rollout.device = \"cuda\""),
    ([*ON_GPU, *BFLOAT16, "rollout.tensor_parallel=2"], "is for one GPU"),
    (ON_GPU, "takes bfloat16: policy.publish_dtype = \"bfloat16\""),
    ([*ON_GPU, *BFLOAT16, *LORA], "rollout.quantization = \"fp8\" takes no adapter alone"),
])
def test_what_vllm_does_not_do_together_is_refused(settings: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        resolve("grpo-arithmetic", ["rollout.engine=vllm", *settings])


@pytest.mark.parametrize("settings", [
    ["rollout.device=cuda", "rollout.gpu_memory=0.2", "rollout.cuda_graphs=false"], LORA,
    [*LORA, *BFLOAT16, "rollout.device=cuda"],
    [*ON_GPU, *BFLOAT16], [*ON_GPU, *BFLOAT16, *MERGED], [*MERGED, "rollout.tensor_parallel=2"]])
def test_gpus_adapters_and_fp8_are_for_vllm_too(settings: list[str]) -> None:
    resolve("grpo-arithmetic", ["rollout.engine=vllm", *settings])


def test_the_built_in_engine_rounds_whole_models_only() -> None:
    resolve("grpo-arithmetic", ["rollout.quantization=fp8"])
    with pytest.raises(UserError, match="takes no adapter alone"):
        resolve("grpo-arithmetic", ["rollout.quantization=fp8", *LORA])


def test_an_engine_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout\.engine"):
        resolve("grpo-arithmetic", ["rollout.engine=sglang"])


def test_parts_of_a_model_are_for_vllm_alone() -> None:
    resolve("grpo-arithmetic", ["rollout.engine=vllm", "rollout.tensor_parallel=2"])
    with pytest.raises(UserError, match="rollout.tensor_parallel is for rollout.engine = \"vllm\""):
        resolve("grpo-arithmetic", ["rollout.tensor_parallel=2"])


def test_the_logprobs_of_vllm_are_the_raw_ones_where_tokens_are_cut_off() -> None:
    assert vllm_logprobs_mode(SamplingSettings(temperature=0.7)) == "processed_logprobs"
    assert vllm_logprobs_mode(SamplingSettings(top_k=3)) == "raw_logprobs"


def test_every_seed_and_sample_has_a_seed_of_its_own() -> None:
    prompt = np.zeros(1, np.int32)
    seeds = {seed_of(GenerateItem(prompt, seed, sample)) for seed in range(30) for sample in range(30)}
    assert len(seeds) == 900 and 0 <= min(seeds) and max(seeds) < 1 << 63
