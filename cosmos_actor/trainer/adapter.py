"""A LoRA adapter (Hu et al. 2021) on a frozen base, by peft: what is trained, published and saved is the adapter.

    y = W·x + s·B·(A·x),  s = alpha / rank        A [rank, I] random, B [O, rank] zero: at first exactly the base

Names of an adapter's tensors are peft's in its files: base_model.model.LAYER.lora_A.weight. With them travels
`base_model.digest`, the 32 bytes of the digest that the base would have if it were published whole. So the digest of a
version speaks of base and adapter, and whoever has another base can not report it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from cosmos_actor.actors.errors import NotFound
from cosmos_actor.trainer.adapter_targets import check_targets
from cosmos_actor.trainer.models import DTYPES, load_model, saved_buffers
from cosmos_actor.trainer.settings import LoraSettings, TrainerSettings
from cosmos_actor.trainer.tiny_model import TINY
from cosmos_actor.weight_plane.device_digest import tensor_digests_on
from cosmos_actor.weight_plane.digest import combined_digest

BASE_DIGEST = "base_model.digest"
PREFIX = "base_model.model."
"""Before a tensor's own name in peft's files."""
ADAPTER = "default"
"""peft's name for the only adapter of a model, in the names of parameters and nowhere else."""
BUFFER = "adapter_base_digest"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""What peft calls them."""


def load_trained_model(settings: TrainerSettings, device: str | torch.device) -> torch.nn.Module:
    """What the trainer trains, float32: the model, or its frozen base with an adapter."""
    return _load(settings, "float32", device, adapted=settings.lora.rank > 0)


def load_served_model(settings: TrainerSettings, device: str | torch.device) -> torch.nn.Module:
    """What an engine or a scorer takes published versions into: base and adapter where adapters are published."""
    adapted = settings.lora.rank > 0 and settings.lora.publish == "adapter"
    return _load(settings, settings.publish_dtype, device, adapted=adapted)


def _load(settings: TrainerSettings, dtype: str, device: str | torch.device, *, adapted: bool) -> torch.nn.Module:
    if not adapted:
        return load_model(settings.model, seed=settings.seed, dtype=dtype, device=device)
    model = load_model(settings.model, seed=settings.seed, dtype=dtype)
    add_adapter(model, settings.lora, seed=settings.seed, digest_dtype=DTYPES[settings.publish_dtype])
    return model.to(device)


def add_adapter(model: torch.nn.Module, lora: LoraSettings, *, seed: int, digest_dtype: torch.dtype) -> None:
    """Freeze `model`, which is on the host, and put an adapter into it, a function of the settings and `seed`.

    The base's digest is of its tensors as `digest_dtype`. Raises BadValue for targets that can have none, NotFound
    without peft.
    """
    check_targets(dict(_linear_layers(model)), lora.targets)
    config = _peft_config(lora)
    digest = _digest_as(model, digest_dtype)
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapters(name))
    buffer = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)
    model.register_buffer(BUFFER, buffer, persistent=False)
    model.eval()


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether `add_adapter` was called on it."""
    return hasattr(model, BUFFER)


def adapter_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The base's digest and every tensor of the adapter, by peft's names, in the module's order."""
    own = {_peft_name(name): tensor for name, tensor in model.named_parameters() if _is_adapters(name)}
    return {BASE_DIGEST: model.get_buffer(BUFFER), **own}


def base_digest_of(model: torch.nn.Module) -> str:
    """64 hex digits; empty for a model without an adapter."""
    return bytes(model.get_buffer(BUFFER).cpu().numpy()).hex() if is_adapted(model) else ""


def merged_tensors(
    model: torch.nn.Module, dtype: torch.dtype, whole: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Base and adapter as one model under the base's own names: W + s·B·A, computed in float32, then `dtype`.

    `whole` gathers a sharded tensor; a collective where there are shards.
    """
    parts = dict(model.named_parameters())
    return {name.replace(".base_layer.", "."): _merged(model, name, parts, whole).to(dtype)
            for name in parts if not _is_adapters(name)} | saved_buffers(model)


@torch.no_grad()
def _merged(model: torch.nn.Module, name: str, parts: dict[str, torch.Tensor],
            whole: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    base = whole(parts[name].detach()).float()
    path, found, parameter = name.rpartition(".base_layer.")
    if not found or parameter != "weight":
        return base
    A, B = (whole(parts[f"{path}.{part}.{ADAPTER}.weight"].detach()).float() for part in ("lora_A", "lora_B"))
    scaling: Any = model.get_submodule(path).scaling
    return base + (B @ A) * scaling[ADAPTER]


def save_adapter(model: torch.nn.Module, settings: TrainerSettings, directory: Path,
                 whole: Callable[[torch.Tensor], torch.Tensor], *, write: bool = True) -> None:
    """A directory that peft's `PeftModel.from_pretrained` loads. A collective; writes only where `write`."""
    tensors = {name: whole(tensor.detach()).cpu().contiguous() for name, tensor in adapter_tensors(model).items()
               if name != BASE_DIGEST}
    if not write:
        return
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt", BASE_DIGEST: base_digest_of(model)})
    config = _peft_config(settings.lora)
    config.base_model_name_or_path = _where(settings.model)
    config.inference_mode = True
    config.save_pretrained(directory)


def _peft_config(lora: LoraSettings) -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise NotFound(f"policy.lora.rank = {lora.rank} needs the package peft: pip install 'cosmos-actor[train]' "
                       f"({error})", setting="policy.lora.rank") from error
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), lora_dropout=0.0,
                      bias="none", task_type="CAUSAL_LM")


def _linear_layers(model: torch.nn.Module) -> Iterator[tuple[str, bool]]:
    """(last part of the name, whether its weight is another module's too) of each linear layer."""
    owners = [parameter for module in model.modules() for parameter in module._parameters.values()]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield name.rpartition(".")[2], sum(parameter is module.weight for parameter in owners) > 1


def _digest_as(model: torch.nn.Module, dtype: torch.dtype) -> str:
    """What `weights_digest` gives for the whole model, published as `dtype`; a tensor at a time."""
    digests: dict[str, bytes] = {}
    for name, tensor in {**dict(model.named_parameters()), **saved_buffers(model)}.items():
        own = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        digests.update(tensor_digests_on({name: own}))
    return combined_digest(digests)


def _is_adapters(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _peft_name(name: str) -> str:
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def _where(model: str) -> str:
    """What an adapter's files say of their base."""
    from cosmos_actor.trainer.model_directory import model_directory

    return model if model.startswith(TINY) else str(model_directory(model))
