"""fp8 rollouts: a version is named by what was sent, rounding is measured, and what is held can still be proven."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cosmos_actor.roles.engine import WeightsSpoiled
from cosmos_actor.roles.quantised import E4M3, Made, distances, kind_of, quantised_layers, rounded
from cosmos_actor.roles.torch_engine import TorchEngine
from cosmos_actor.roles.vllm_fp8 import held_bytes_digest, whole_rows
from cosmos_actor.roles.vllm_weights import Place
from cosmos_actor.trainer.model_weights import named_tensors
from cosmos_actor.trainer.models import load_model
from cosmos_actor.weight_plane.digest import weights_digest
from tests.roles.test_engine import STOP, items, make_engine, settings, weights_of
from tests.trainer.make import MODEL

HALF_STEP = 2.0**-4
"""Of e4m3, which has three bits after the first, relative to the number that is rounded."""


def fp8_engine() -> TorchEngine:
    return TorchEngine(load_model(MODEL), stop_ids=(STOP,), pad_id=0, fp8=True)


def test_each_output_has_its_own_scale_and_rounding_twice_is_rounding_once() -> None:
    matrix = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 8)[:, None]
    matrix[3] = 0.0
    made = rounded(matrix)
    assert torch.allclose(made.abs().amax(1), matrix.abs().amax(1), rtol=1e-6) and torch.equal(made[3], matrix[3])
    large = matrix.abs() > matrix.abs().amax(1, keepdim=True) / 256  # below are fixed steps
    assert ((made - matrix).abs()[large] <= HALF_STEP * matrix.abs()[large] * 1.001).all()
    assert not torch.equal(made, matrix) and torch.allclose(rounded(made), made, rtol=1e-6)


def test_distances_are_of_all_layers_of_a_kind_and_of_the_worst() -> None:
    one, two = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 12.0]])
    found = distances([("a.0.q_proj.weight", one, one + torch.tensor([[0.0, 1.0]])), ("a.1.q_proj.weight", two, two),
                       ("a.0.o_proj.weight", one, one)])
    assert found["q_proj"].rms == pytest.approx(1 / 13) and found["q_proj"].largest == pytest.approx(0.25)
    assert found["o_proj"].rms == found["o_proj"].largest == 0.0
    assert distances([]) == {} and kind_of("a.0.q_proj.weight") == "q_proj"


def test_the_embedding_and_the_head_are_left_as_they_are() -> None:
    engine, weights = fp8_engine(), weights_of(1)
    engine.load_weights(weights, 1, weights_digest(weights))
    linear = {name for name, _ in quantised_layers(engine.model)}
    assert any("down_proj" in name for name in linear)
    for name, tensor in named_tensors(engine.model).items():
        assert np.array_equal(tensor.numpy(), weights[name]) == (name not in linear), name


def test_a_version_is_named_by_what_was_sent_and_its_distance_is_told() -> None:
    engine, weights = fp8_engine(), weights_of(1)
    digest = weights_digest(weights)
    assert engine.load_weights(weights, 1, digest) == engine.read_back() == engine.held.digest == digest
    counts = engine.statistics()
    kinds = {name.split("/")[1] for name in counts if name.startswith("fp8/")}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(0.005 < counts[f"fp8/{kind}/rms"] < 0.05 for kind in kinds)
    assert all(0.01 < counts[f"fp8/{kind}/max"] < HALF_STEP for kind in kinds)


def test_whoever_changes_what_is_held_is_found_and_spoiled_bytes_are_not_taken() -> None:
    engine, weights = fp8_engine(), weights_of(1)
    engine.load_weights(weights, 1, weights_digest(weights))
    before = engine.generate(items(), settings())
    with pytest.raises(WeightsSpoiled):
        engine.load_weights(weights_of(2), 2, weights_digest(weights))
    after = engine.generate(items(), settings())
    assert all(one.logprobs.tobytes() == two.logprobs.tobytes() for one, two in zip(before, after, strict=True))
    next(quantised_layers(engine.model))[1].weight[0, 0] += 1
    assert engine.read_back() not in ("", engine.held.digest)


def test_the_log_probs_are_those_of_the_rounded_weights() -> None:
    weights = {name: array * 8 if array.ndim > 1 else array for name, array in weights_of(1).items()}
    engine, plain = fp8_engine(), make_engine()
    digest = weights_digest(weights)
    answers = [one.generate(items(), settings()) for one in (engine, plain)
               if one.load_weights(weights, 1, digest) == digest]
    off = max(float(np.abs(a.logprobs[0] - b.logprobs[0])) for a, b in zip(*answers, strict=True)
              if a.tokens[0] == b.tokens[0])
    assert 1e-4 < off


def test_what_vllm_keeps_of_a_joined_layer_is_read_by_rows_and_without_its_padding() -> None:
    joined = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    scale = joined.abs().amax(1, keepdim=True) / torch.finfo(E4M3).max
    kept = torch.nn.functional.pad((joined / scale).to(E4M3).float(), (0, 11, 0, 10)).to(E4M3).t()
    rows = whole_rows(kept, torch.nn.functional.pad(scale, (0, 0, 0, 10), value=1.0), Place("x", "weight", 2, 3, ()), 5)
    assert torch.allclose(rows, rounded(joined)[2:5])


def test_a_digest_of_fp8_parameters_is_of_their_bits() -> None:
    layer = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
    layer.weight.data = layer.weight.data.to(E4M3)
    before = held_bytes_digest(layer)
    assert before == held_bytes_digest(layer)
    layer.weight.data.view(torch.uint8)[2, 1] ^= 1
    assert held_bytes_digest(layer) != before


def test_made_of_a_version_is_named_by_it_only_while_it_is_what_was_made() -> None:
    assert Made("sent", "held").name("held") == "sent" and Made("sent", "held").name("other") == "other"
