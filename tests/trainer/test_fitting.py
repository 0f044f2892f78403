"""What a model can not hold is refused in one line that names the first ten and the setting, and nothing is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cosmos_actor.trainer.model_weights import WeightsDoNotFit, load_whole, weights_digest_of

LAYERS = 12


def model(width: int = 4, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(dtype)


def weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().float().numpy() for name, tensor in module.named_parameters()}


def refusal(own: torch.nn.Module, offered: dict[str, np.ndarray]) -> str:
    before = weights_digest_of(own)
    with pytest.raises(WeightsDoNotFit) as raised:
        load_whole(own, offered)
    assert weights_digest_of(own) == before
    return str(raised.value)


def test_other_shapes_are_named_ten_of_them_with_the_setting():
    line = refusal(model(4), weights(model(5)))
    assert line.startswith("weights do not fit the model (policy.model): 0.weight is [4, 4], not [5, 5]; 1.weight ")
    assert "9.weight is" in line and "10.weight" not in line and line.endswith("(12 of 12 tensors)")


def test_other_names_are_named_ten_of_each_kind():
    offered = {f"other.{name}": array for name, array in weights(model()).items()}
    line = refusal(model(), offered)
    assert "missing 0.weight, 1.weight, 10.weight, " in line and "; unknown other.0.weight, " in line
    assert line.count(".weight") == 20 and line.endswith("(24 names)") and "(policy.model)" in line


@pytest.mark.parametrize(("own", "offered"), [
    (torch.bfloat16, np.float32), (torch.float32, np.uint16), (torch.float32, np.float16), (torch.bfloat16, np.int8)])
def test_a_dtype_that_the_engine_does_not_hold_names_its_setting(own, offered):
    arrays = {name: array.astype(offered) for name, array in weights(model()).items()}
    line = refusal(model(dtype=own), arrays)
    assert line.startswith(f"weights do not fit the model (policy.publish_dtype): 0.weight is {own}, not torch.")


def test_a_scalar_keeps_its_shape():
    module = torch.nn.Module()
    module.scale = torch.nn.Parameter(torch.tensor(1.0))
    load_whole(module, {"scale": np.array(2.5, np.float32)})
    assert module.scale.item() == 2.5
