"""What is known of a model's linear layers before it is loaded is what the loaded model has."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.trainer.adapter import _linear_layers
from cosmos_actor.trainer.adapter_targets import LAYERS, check_targets, gguf_architecture, linear_layers
from cosmos_actor.trainer.models import load_model

TINY = "tiny:qwen3?hidden=32&layers=1&heads=2&kv_heads=1&intermediate=64&vocab=32&positions=32"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 32, "pad_token_id": 0}


@pytest.mark.parametrize("family", LAYERS)
def test_the_families_have_these_layers_in_transformers(family, tmp_path):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert set(linear_layers(str(tmp_path))) == set(dict(_linear_layers(model)))


def test_a_tiny_model_has_these_layers_and_its_head_is_the_embedding():
    assert linear_layers(TINY) == dict(_linear_layers(load_model(TINY, seed=0, dtype="float32")))


@pytest.mark.parametrize(("said", "family"), [
    (b"\x14\0\0\0\0\0\0\0general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama", "llama"),
    (b"\x0c\0\0\0\0\0\0\0general.name\x08\0\0\0\x05\0\0\0\0\0\0\0llama", ""), (b"", "")])
def test_a_gguf_file_tells_its_family_first_or_not_at_all(said, family, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0" + bytes(16) + said)
    assert gguf_architecture(file) == family
    assert (linear_layers(f"gguf:{file}") is None) is (not family)


def test_what_can_not_be_known_is_left_to_the_model_itself(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "not_heard_of"}')
    assert linear_layers(str(tmp_path)) is None and linear_layers(str(tmp_path / "nowhere")) is None


def test_a_shared_head_is_refused_and_the_default_targets_fit():
    check_targets(linear_layers(TINY), resolve("grpo-arithmetic").policy.lora.targets)
    with pytest.raises(BadValue, match="whose matrix the embedding shares"):
        check_targets(linear_layers(TINY), ["lm_head"])
