"""Where vLLM keeps each tensor of a checkpoint, and what it computes with, read back from there.

vLLM joins tensors (q, k, v and gate, up are one layer each), pads the vocabulary, and on the CPU packs the matrices of
linear layers for its kernels and throws the tensors away. What is packed can not be looked at. It can be asked: a layer
applied to the identity gives its matrix, through the very kernel that answers are computed by. Every output is one
element times one, plus zeros, so it is that element to the last bit.

A worker of several that share a model has a part of most tensors, and that part is what is read.

Legend: I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cosmos_actor.weight_plane.device_digest import tensor_digests_on
from cosmos_actor.weight_plane.digest import combined_digest
from cosmos_actor.weight_plane.engine_layout import Cut
from cosmos_actor.weight_plane.reshard import Box, along, shape_of, size, whole

ROWS = 256
"""Of the identity at once: bounds the memory of a reading to so many rows of the widest layer."""


class NotFoundInVllm(LookupError):
    """vLLM's model keeps a tensor where this module does not look, or has parameters that no tensor goes to."""


class TwoMatrices(RuntimeError):
    """What a checkpoint has once, vLLM has twice, and the two differ."""


@dataclass(frozen=True)
class Place:
    """Rows `start` to `start + rows` of one parameter of one of vLLM's modules: `box` of the whole tensor."""

    module: str
    parameter: str
    start: int
    rows: int
    box: Box


@torch.inference_mode()
def places(model: Any, shapes: Mapping[str, torch.Size]) -> dict[str, Place]:
    """The place of each tensor of a checkpoint, or of this worker's part of it; no parameter of `model` is without.

    Raises NotFoundInVllm naming what has no place.
    """
    found = locate(model, shapes)
    for name, rows in _rows(model, found):
        if tuple(rows.shape) != shape_of(found[name].box):
            raise NotFoundInVllm(f"vLLM's {found[name].module} has {list(rows.shape)} for {name} of "
                                 f"{list(shape_of(found[name].box))}")
    filled = {f"{place.module}.{place.parameter}" for place in found.values()}
    spare = sorted({name for name, _ in model.named_parameters()} - filled)
    if spare:
        raise NotFoundInVllm(f"vLLM's {type(model).__name__} has parameters that no tensor goes to: {spare[0]}")
    return found


def locate(model: Any, shapes: Mapping[str, torch.Size]) -> dict[str, Place]:
    """As `places`, without a look at what is there: it may be kept otherwise, as quantised matrices are."""
    joined = {part: (layer, parts) for layer, parts in getattr(model, "packed_modules_mapping", {}).items()
              for part in parts}
    return {name: _place(model, name, shape, joined) for name, shape in shapes.items()}


def _place(model: Any, name: str, shape: torch.Size, joined: Mapping[str, tuple[str, list[str]]]) -> Place:
    path, _, parameter = name.rpartition(".")
    parent, _, own = path.rpartition(".")
    layer, parts = joined.get(own, (own, [own]))
    path = f"{parent}.{layer}" if parent else layer
    try:
        module = model.get_submodule(path)
        if hasattr(module, "base_layer"):  # vLLM's own wrapper of a layer that adapters have
            path, module = f"{path}.base_layer", module.base_layer
        module.get_parameter(parameter)
    except AttributeError as error:
        raise NotFoundInVllm(f"vLLM's {type(model).__name__} has no {path}.{parameter} for {name}") from error
    number = parts.index(own)
    box = _box(module, name, shape, number if len(parts) > 1 else None)
    extent = shape_of(box)
    sizes = module.output_partition_sizes if len(parts) > 1 else [extent[0]]
    if len(sizes) != len(parts) or sizes[number] != extent[0]:
        raise NotFoundInVllm(f"vLLM's {path} is cut into {sizes}, which {name} of {list(extent)} does not fit")
    return Place(path, parameter, sum(sizes[:number]), extent[0], box)


def _box(module: Any, name: str, shape: torch.Size, number: int | None) -> Box:
    """What of a tensor this worker's `module` has. number: of the tensor among those of a joined layer."""
    if getattr(module, "tp_size", 1) == 1:
        return whole(shape)
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, VocabParallelEmbedding):  # which keeps no rank of its own in every version
        rows = module.shard_indices
        return along(shape, 0, rows.org_vocab_start_index, rows.org_vocab_end_index)
    cut = Cut(module.tp_rank, module.tp_size)
    if isinstance(module, linear.QKVParallelLinear):
        return cut.rows(name, shape, module.num_kv_head_replicas if number else 1)
    if isinstance(module, linear.ColumnParallelLinear):
        return cut.rows(name, shape)
    if isinstance(module, linear.RowParallelLinear) and len(shape) > 1:
        return cut.columns(name, shape)
    return whole(shape)


@dataclass(frozen=True)
class Small:
    """What a product does not tell of a tensor: a zero's sign and, on some processors, that a number smaller than the
    smallest normal one is not zero."""

    dtype: torch.dtype
    index: torch.Tensor
    """[N] int64, where such elements are in the flattened tensor."""
    values: torch.Tensor

    def into(self, read: torch.Tensor) -> torch.Tensor:
        """`read`, contiguous and of `dtype`, with these elements where it has zeros in their places."""
        whole = read.to(self.dtype).contiguous()
        if len(self.index):
            flat = (whole.clone() if whole.data_ptr() == read.data_ptr() else whole).view(-1)
            now = flat[self.index]
            flat[self.index] = torch.where(now == 0, self.values, now)
            whole = flat.view(whole.shape)
        return whole


def small_numbers(offered: Mapping[str, torch.Tensor]) -> dict[str, Small]:
    """Of every tensor that is given to vLLM, or of this worker's part of it."""
    found = {}
    for name, tensor in offered.items():
        index = (tensor.abs() < torch.finfo(tensor.dtype).tiny).flatten().nonzero()[:, 0]
        found[name] = Small(tensor.dtype, index, tensor.flatten()[index].clone())
    return found


@torch.inference_mode()
def held_digests(model: Any, found: Mapping[str, Place], small: Mapping[str, Small]) -> dict[str, bytes]:
    """The digests of what `model` computes with, a tensor at a time: no second copy of the model is made.

    small: of what was given. Of what this worker has no row of there is no digest. Raises TwoMatrices when a tied head
    computes with another matrix than its embedding.
    """
    digests: dict[str, bytes] = {}
    for name, rows in _rows(model, {name: place for name, place in found.items() if size(place.box)}):
        digests.update(tensor_digests_on({name: small[name].into(rows)}))
    for head, table in tied_heads(model, found):
        if table not in digests:
            continue
        matrix = small[table].into(matrix_of(head)[: found[table].rows])
        if tensor_digests_on({table: matrix})[table] != digests[table]:
            raise TwoMatrices(f"vLLM's output head computes with another matrix than {table}, which it is tied to")
    return digests


def held_digest(model: Any, found: Mapping[str, Place], small: Mapping[str, Small]) -> str:
    """The digest of a model that one worker has whole; see `held_digests`."""
    return combined_digest(held_digests(model, found, small))


def _rows(model: Any, found: Mapping[str, Place]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor as it is at its place now. What is joined is read once, where its tensors follow one another."""
    read = lru_cache(maxsize=2)(lambda module, parameter: parameter_of(model.get_submodule(module), parameter))
    for name, place in found.items():
        yield name, read(place.module, place.parameter)[place.start : place.start + place.rows]


def parameter_of(module: Any, parameter: str) -> torch.Tensor:
    """A parameter as it is, or read through the layer where that computes with a packed copy of it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    tensor = module.get_parameter(parameter)
    head = parameter == "weight" and isinstance(module, ParallelLMHead) and tensor.device.type == "cpu"
    return matrix_of(module) if head or tensor.numel() == 0 else tensor


def matrix_of(module: Any) -> torch.Tensor:
    """[O, I] of the weights' dtype: what the layer, without its bias, multiplies with."""
    kept = module.weight
    width = kept.shape[1] if kept.numel() else module.input_size_per_partition
    columns = [module.quant_method.apply(module, rows) for rows in torch.eye(width, dtype=kept.dtype).split(ROWS)]
    return torch.cat(columns).t()


def tied_heads(model: Any, found: Mapping[str, Place]) -> Iterator[tuple[Any, str]]:
    """Each output head that has no tensor of its own, with the name of the embedding that it shares."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    own = {place.module for place in found.values()}
    embeddings = {model.get_submodule(place.module).weight.data_ptr(): name for name, place in found.items()
                  if model.get_submodule(place.module).weight.numel()}
    for path, module in model.named_modules():
        if isinstance(module, ParallelLMHead) and path not in own:
            yield module, embeddings[module.weight.data_ptr()]


def pack_heads(model: Any) -> None:
    """Pack the output heads anew: a reload of vLLM's forgets a tied one, which then computes with what was before."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)

