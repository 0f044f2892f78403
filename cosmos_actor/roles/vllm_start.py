"""Starting vLLM: its CPU or its GPU build, whichever `rollout.python` has, with room for a model and nothing in it."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cosmos_actor.actors.errors import BadValue, NotFound
from cosmos_actor.roles.vllm_plugin.loader import engine_arguments
from cosmos_actor.roles.vllm_versions import DECODE_GRAPHS, FP8
from cosmos_actor.trainer.model_directory import model_directory
from cosmos_actor.trainer.tiny_model import TINY

IN_THIS_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Read when vLLM is imported."""
UNLESS_SET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several rollouts of one host would all be bound to the same cores
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it takes no seed for each sequence
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # NVLink multicast, which virtual machines may not use
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would take this process's threads for running ones
    "VLLM_LOGGING_LEVEL": "ERROR",  # below it, each swap warns of layers that have nothing to load
    "TORCHDYNAMO_DISABLE": "1",
}
"""`rollout.env` may say otherwise."""
LEAST_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens that one pass of vLLM may read."""
CPU_CACHE_BLOCK = 32
"""Tokens: what prompts have in common is found in whole blocks. The least that its CPU build computes well with; the
attention kernel of a GPU says itself which it wants."""
GPU_CACHE_BLOCK, SMALL_CACHE_BYTES = 16, 1 << 30
"""Tokens of a block there, and what is little of a GPU's memory."""
CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True, kw_only=True)
class Start:
    """What vLLM is started with."""

    dtype: str = "float32"
    logprobs_mode: str
    sequences: int = 256
    """As many at a time."""
    threads: int = 1
    """Of each process on the CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensor_parallel: int = 1
    gpu_memory: float = 0.4
    """Share of a GPU for weights and cache; a small model's cache is smaller than that, see `_enough_cache`."""
    cuda_graphs: bool = True
    sleeping: bool = False
    """Weights and cache are to be given back and taken again (`sleep`, `wake`)."""
    lora_rank: int = 0
    """Adapters up to this rank are taken; 0: none."""
    lora_targets: tuple[str, ...] = ()
    quantization: Literal["none", "fp8"] = "none"


def start(model: Any, name: str, wanted: Start, base: str = "") -> tuple[Any, str]:
    """vLLM's engine for `model`, a skeleton, which is called `name`, and the kind of device that it computes on.

    base: a directory whose weights it loads; empty: versions will come, and it begins with none.

    Raises NotFound without vLLM here, BadValue when it is another build than wanted, and whatever vLLM refuses it for.
    """
    os.environ.update(IN_THIS_PROCESS)
    if wanted.tensor_parallel > 1:
        os.environ["OMP_NUM_THREADS"] = str(wanted.threads)  # each worker reads it when it imports torch
    for variable, value in UNLESS_SET.items():
        os.environ.setdefault(variable, value)
    try:
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
    except ImportError as error:
        raise NotFound(f"rollout.engine = \"vllm\" needs vLLM in rollout.python: {error}",
                       setting="rollout.python") from error
    device = device_of(current_platform, wanted.device)
    check(wanted, device)
    with tempfile.TemporaryDirectory() as scratch:
        directory = base or _directory(model, name, Path(scratch))
        engine = LLM(directory, load_format="auto" if base else "dummy", **arguments(wanted, device),
                     **({} if device == CPU else _enough_cache(model.config, wanted)))
    # Some models are refused only when they compute: those with heads of 16 numbers are, on the CPU.
    engine.generate({"prompt_token_ids": [0]}, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    return engine, device


def device_of(platform: Any, wanted: str) -> str:
    """Where this build of vLLM computes. Raises BadValue unless that is where `wanted` says."""
    found = CPU if platform.is_cpu() else CUDA if platform.is_cuda() else ""
    if not found:
        raise BadValue(f"rollout.engine = \"vllm\" drives vLLM on CPUs and on NVIDIA GPUs; the build that is installed "
                       f"sees {type(platform).__name__}", setting="rollout.python")
    if wanted not in ("auto", found):
        raise BadValue(f"rollout.device = \"{wanted}\", and the vLLM of rollout.python is a build for \"{found}\"",
                       setting="rollout.python")
    return found


def check(wanted: Start, device: str) -> None:
    """Raises BadValue for what vLLM does on the other kind of device only."""
    if device == CPU and wanted.quantization != "none":
        raise BadValue(f"rollout.quantization = \"{wanted.quantization}\" needs vLLM's GPU build, and rollout.python "
                       "has the CPU build; rollout.engine = \"torch\" rounds alike", setting="rollout.quantization")
    if device == CUDA and wanted.lora_rank and wanted.dtype == "float32":
        raise BadValue("vLLM's kernels for adapters on GPUs take 16 bits: policy.publish_dtype = \"bfloat16\" or "
                       "\"float16\", or policy.lora.publish = \"merged\"", setting="policy.publish_dtype")


def arguments(wanted: Start, device: str) -> dict[str, Any]:
    """Of vLLM's `LLM`."""
    common = {
        "skip_tokenizer_init": True, "dtype": wanted.dtype, "seed": 0, "max_model_len": -1,
        "logprobs_mode": wanted.logprobs_mode, "max_num_seqs": wanted.sequences, "disable_log_stats": True,
        "max_num_batched_tokens": max(LEAST_BATCHED_TOKENS[device], wanted.sequences), "enable_prefix_caching": True,
        "async_scheduling": False,  # else a step would sample on with what was there before
    }
    if wanted.lora_rank:
        common |= _lora_arguments(wanted)
    if wanted.tensor_parallel > 1:
        common |= engine_arguments(wanted.tensor_parallel)
    if device == CPU:
        return common | {"enforce_eager": True, "block_size": CPU_CACHE_BLOCK}
    common |= {"gpu_memory_utilization": wanted.gpu_memory, "enable_sleep_mode": wanted.sleeping,
               "enforce_eager": not wanted.cuda_graphs}
    if wanted.cuda_graphs:
        common["compilation_config"] = DECODE_GRAPHS
    if wanted.tensor_parallel > 1:
        common["disable_custom_all_reduce"] = True  # NCCL alone: it needs nothing of the host but NVLink or PCIe
    if wanted.quantization == "fp8":
        common["quantization"] = FP8
    return common


def _enough_cache(config: Any, wanted: Start) -> dict[str, int]:
    """For a small model: twice the key-value cache that all its sequences can fill, in the place of `gpu_memory`.

    vLLM lists every block of its share and goes through the list after each version; of a model whose tokens take half
    a kilobyte a share of a large GPU has millions. Nothing where a configuration does not say what its tokens take.
    """
    sizes = [getattr(config, name, None) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")]
    if not all(isinstance(size, int) for size in sizes):
        return {}
    blocks = 2 * wanted.sequences * -(-config.max_position_embeddings // GPU_CACHE_BLOCK) + wanted.sequences
    number_bytes = 4 if wanted.dtype == "float32" else 2
    cache_bytes = blocks * GPU_CACHE_BLOCK * math.prod(sizes) * 2 * number_bytes  # keys and values
    return {"num_gpu_blocks_override": blocks} if cache_bytes <= SMALL_CACHE_BYTES else {}


def _lora_arguments(wanted: Start) -> dict[str, Any]:
    """One adapter at a time, in the layers that the trainer's has."""
    from cosmos_actor.roles.vllm_adapters import room_for

    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room_for(wanted.lora_rank),
            "lora_target_modules": list(wanted.lora_targets)}


def reason(error: Exception) -> str:
    """vLLM's own words, without what pydantic, which may carry them, adds about its input."""
    mistakes = getattr(error, "errors", None)
    if not callable(mistakes):
        return str(error)
    return "; ".join(str(mistake["msg"]).removeprefix("Value error, ").rstrip(".") for mistake in mistakes())


def _directory(model: Any, name: str, scratch: Path) -> str:
    """A folder with the model's configuration; a tiny model has none of its own."""
    if not name.startswith(TINY):
        return str(model_directory(name))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(scratch)
    return str(scratch)
