"""From a model's name to a module: a Hugging Face directory (see model_directory), or a small decoder in one line.

``tiny:qwen3?hidden=128&layers=4`` is a Qwen3 decoder built from its configuration and a seed; only its own module of
transformers is imported, because the registry of all models takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from cosmos_actor.actors.errors import BadValue, UnknownName
from cosmos_actor.trainer.model_directory import TINY, model_directory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TinySpec:
    """The sizes of a decoder that is trained from scratch."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 352
    vocab: int = 32
    positions: int = 256

    @classmethod
    def parse(cls, name: str) -> TinySpec:
        """Raises UnknownName or BadValue, naming the part of `name` that is wrong."""
        family, _, query = name.removeprefix(TINY).partition("?")
        if family != "qwen3":
            raise UnknownName(f"unknown model family {family!r} in {name!r}; there is qwen3", setting="policy.model")
        known = {field.name for field in fields(cls)}
        sizes: dict[str, int] = {}
        for part in filter(None, query.split("&")):
            key, _, value = part.partition("=")
            if key not in known:
                raise UnknownName(f"unknown size {key!r} in {name!r}; there are {', '.join(sorted(known))}")
            if not value.isdigit():
                raise BadValue(f"size {key} in {name!r} is a number, not {value!r}", setting="policy.model")
            sizes[key] = int(value)
        return cls(**sizes)


def load_model(
    name: str, *, seed: int = 0, dtype: str = "float32", device: str | torch.device = "cpu"
) -> torch.nn.Module:
    """The causal language model called `name`, in evaluation mode.

    A ``tiny:`` model's weights are a function of its sizes and `seed`. Raises NotFound for a directory that is not
    there or has no config.json.
    """
    model = _tiny_model(TinySpec.parse(name), seed) if name.startswith(TINY) else _directory_model(name, DTYPES[dtype])
    return model.to(device=device, dtype=DTYPES[dtype]).eval()


def use_threads(count: int) -> None:
    """Compute with `count` threads from here on in the calling thread: the order of sums depends on their number."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder blocks: the longest list of modules in the model."""
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


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
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
