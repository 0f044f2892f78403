"""Versions written into a model that is laid out as vLLM's are: joined layers, a padded vocabulary, a tied head.

vLLM's own, on a GPU, are in tests/project/test_vllm_gpu.py.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_actor.roles.vllm_in_place import InPlace
from cosmos_actor.roles.vllm_weights import NotFoundInVllm, Place, TwoMatrices, locate
from cosmos_actor.trainer.model_weights import first_not_finite
from cosmos_actor.weight_plane.device_digest import array_of, dtype_name, tensor_digest_on, weights_digest_on
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.flat import Flat, digest_offered
from cosmos_actor.weight_plane.flat_layout import arranged

HEADS = "vllm.model_executor.layers.vocab_parallel_embedding"


class Head(torch.nn.Module):
    """In the place of vLLM's ParallelLMHead."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Joined(torch.nn.Module):
    def __init__(self, sizes: list[int], inputs: int) -> None:
        super().__init__()
        self.output_partition_sizes = sizes
        self.weight = torch.nn.Parameter(torch.full((sum(sizes), inputs), 7.0), requires_grad=False)


class Packed(torch.nn.Module):
    """Eight inputs; a vocabulary of five in eight rows."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 8, dtype=torch.float32).requires_grad_(False)
        self.qkv_proj = Joined([4, 2, 2], 8)
        self.norm = torch.nn.LayerNorm(8, bias=False).requires_grad_(False)
        self.lm_head = Head(self.embed.weight)


SHAPES = {"embed.weight": (5, 8), "q_proj.weight": (4, 8), "k_proj.weight": (2, 8), "v_proj.weight": (2, 8),
          "norm.weight": (8,)}


@pytest.fixture(autouse=True)
def heads(monkeypatch: pytest.MonkeyPatch) -> None:
    for depth in range(1, HEADS.count(".") + 2):
        name = ".".join(HEADS.split(".")[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[HEADS], "ParallelLMHead", Head, raising=False)


def version(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def made(model: Any | None = None) -> tuple[Packed, InPlace]:
    model = model or Packed()
    found = locate(model, {name: torch.Size(shape) for name, shape in SHAPES.items()})
    return model, InPlace(model, found, dict.fromkeys(SHAPES, torch.float32))


def test_a_version_is_read_back_from_the_rows_that_it_was_written_to() -> None:
    model, writer = made()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    for seed in (1, 2):
        tensors = version(seed)
        assert writer.load(tensors, seed, "") == writer.read_back() == weights_digest_on(tensors)
        assert torch.equal(model.qkv_proj.weight, torch.cat([tensors[f"{part}_proj.weight"] for part in "qkv"]))
        assert torch.equal(model.lm_head.weight[:5], tensors["embed.weight"])
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]  # which CUDA graphs know
    assert writer.digests()["k_proj.weight"] == tensor_digest_on(tensors["k_proj.weight"])


def test_padding_is_zero_after_each_version_whatever_was_there() -> None:
    model, writer = made()
    writer.write(version(1))
    assert model.embed.weight[5:].eq(0).all() and model.embed.weight[:5].ne(0).all()
    model.embed.weight[5:] = float("nan")  # what memory has after a sleep that kept nothing
    writer.write(version(2))
    assert model.embed.weight[5:].eq(0).all()


def test_one_changed_element_is_another_digest() -> None:
    model, writer = made()
    digest = writer.load(version(1), 1, "")
    model.qkv_proj.weight[5, 3] += 1e-3
    assert writer.read_back() != digest


def test_a_head_that_is_no_longer_tied_is_found() -> None:
    model, writer = made()
    writer.write(version(1))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    with pytest.raises(TwoMatrices, match="than embed.weight, which it is tied to"):
        writer.read_back()


def test_a_head_of_its_own_that_nothing_comes_for_is_refused_at_the_start() -> None:
    model = Packed()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(8, 8), requires_grad=False)
    with pytest.raises(NotFoundInVllm, match="output head has a matrix of its own"):
        made(model)


def test_a_parameter_of_another_dtype_is_refused_at_the_start() -> None:
    model = Packed()
    model.norm.to(torch.bfloat16)
    with pytest.raises(NotFoundInVllm, match=r"torch\.bfloat16 for norm\.weight of torch\.float32"):
        made(model)


def test_layers_that_have_adapters_are_found_inside_vllms_wrapper() -> None:
    model, wrapper = Packed(), torch.nn.Module()
    wrapper.base_layer, model.qkv_proj = model.qkv_proj, wrapper
    found = locate(model, {"k_proj.weight": torch.Size((2, 8))})
    assert found["k_proj.weight"] == Place("qkv_proj.base_layer", "weight", 4, 2, ((0, 2), (0, 8)))


def test_a_part_of_a_vocabulary_is_found_where_its_layer_keeps_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.26's does not; nothing of other layers is asked then."""
    layers = ModuleType("vllm.model_executor.layers")
    layers.linear = ModuleType(f"{layers.__name__}.linear")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    monkeypatch.setattr(sys.modules[HEADS], "VocabParallelEmbedding", torch.nn.Embedding, raising=False)
    model = Packed()
    model.embed.tp_size = 2  # type: ignore[assignment]
    model.embed.shard_indices = SimpleNamespace(  # type: ignore[assignment]
        org_vocab_start_index=3, org_vocab_end_index=5)
    found = locate(model, {"embed.weight": torch.Size((5, 8))})
    assert found["embed.weight"] == Place("embed", "weight", 0, 2, ((3, 5), (0, 8)))


def test_tensors_are_compared_with_their_digest_where_they_are() -> None:
    tensors = version(1) | {"half": torch.ones(3, 2, dtype=torch.bfloat16)}
    arrays = {name: array_of(tensor) for name, tensor in tensors.items()}
    mixed = arrays | {"q_proj.weight": tensors["q_proj.weight"], "half": tensors["half"]}
    assert digest_offered(tensors) == digest_offered(arrays) == digest_offered(mixed) == weights_digest(arrays)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_tensor_with_a_number_that_is_not_finite_is_named(value: float) -> None:
    tensors = version(1) | {"count": torch.zeros(2, dtype=torch.int64)}
    assert first_not_finite(tensors) == first_not_finite({}) == ""
    tensors["v_proj.weight"][1, 2] = tensors["norm.weight"][0] = value
    assert first_not_finite(tensors) == "v_proj.weight"
    flat = Flat(arranged({name: (dtype_name(one), tuple(one.shape)) for name, one in tensors.items()}),
                torch.device("cpu"))
    flat.fill(tensors)
    assert first_not_finite(flat.tensors()) == "v_proj.weight"
    flat.fill(version(1))
    assert first_not_finite(flat.tensors()) == ""


@pytest.mark.gpu
def test_a_version_of_the_host_reaches_a_gpu_through_pinned_memory() -> None:
    model, writer = made(Packed().to("cuda"))
    tensors = version(1)
    assert writer.load(tensors, 1, "") == weights_digest_on(tensors)
    assert model.embed.weight[5:].eq(0).all()
    on_device = {name: tensor.cuda() for name, tensor in version(2).items()}
    mixed = version(2) | {name: on_device[name] for name in list(on_device)[::2]}
    assert writer.load(mixed, 2, "") == weights_digest_on(version(2))
    assert first_not_finite(mixed) == "" and digest_offered(mixed) == weights_digest_on(version(2))
