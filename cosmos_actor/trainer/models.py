"""From a model's name to a module: a Hugging Face directory (see model_directory), or a small decoder in one line.

``tiny:qwen3?hidden=128&layers=4`` is a Qwen3 decoder built from its configuration and a seed; only its own module of
transformers is imported, because the registry of all models takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.trainer.model_directory import model_directory
from cosmos_actor.trainer.model_files import check_directory
from cosmos_actor.trainer.tiny_model import TINY, TinySpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str, *, seed: int = 0, dtype: str = "float32", device: str | torch.device = "cpu"
) -> torch.nn.Module:
    """The causal language model called `name`, in evaluation mode.

    A ``tiny:`` model's weights are a function of its sizes and `seed`. Raises NotFound or BadValue for a directory that
    is not there, not whole, or not a model that transformers knows.
    """
    model = _tiny_model(TinySpec.parse(name), seed) if name.startswith(TINY) else _directory_model(name, DTYPES[dtype])
    return model.to(device=device, dtype=DTYPES[dtype]).eval()


def skeleton(name: str, *, dtype: str = "float32") -> torch.nn.Module:
    """As `load_model`, on the meta device: names, shapes, dtypes and the configuration, without memory for weights."""
    with torch.device("meta"):
        if name.startswith(TINY):
            return _tiny_model(TinySpec.parse(name), seed=0).to(dtype=DTYPES[dtype]).eval()
        from transformers import AutoConfig, AutoModelForCausalLM

        configuration = AutoConfig.from_pretrained(model_directory(name), local_files_only=True)
        return AutoModelForCausalLM.from_config(configuration).to(dtype=DTYPES[dtype]).eval()


def use_threads(count: int) -> None:
    """Compute with `count` threads from here on in the calling thread: the order of sums depends on their number."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder blocks: the longest list of modules in the model."""
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to a model's weights: those that are in its state dict, by name, each storage once."""
    saved = set(model.state_dict(keep_vars=True).keys())
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def recompute_activations(model: Any) -> None:
    """Make the decoder blocks keep their inputs only, and compute the rest again for the gradient.

    transformers does so for blocks in training mode; what is inside them stays in evaluation mode, without dropout.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def _tiny_model(spec: TinySpec, seed: int) -> torch.nn.Module:
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=spec.hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.hidden // spec.heads,
        intermediate_size=spec.intermediate,
        vocab_size=spec.vocab,
        max_position_embeddings=spec.positions,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def _directory_model(name: str, dtype: torch.dtype) -> Any:
    directory = model_directory(name)
    check_directory(directory)
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise BadValue(f"transformers can not load {directory}: {error}", setting="policy.model") from error
