"""A model's name leads to its files, or to one line that says what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_actor.actors.errors import BadValue, NotFound, UnknownName, UserError
from cosmos_actor.trainer.model_directory import attention_heads, cache_directory, check_model_files, model_directory
from cosmos_actor.trainer.models import blocks_of, load_model
from cosmos_actor.trainer.tiny_model import TinySpec

HIDDEN, HEADS, KV_HEADS, LAYERS = 16, 4, 2, 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_ACTOR_CACHE", str(tmp_path / "cache"))


def weights() -> dict[str, np.ndarray]:
    """A small llama's tensors under Hugging Face names, exact in bfloat16."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=262, max_position_embeddings=64, tie_word_embeddings=True,
        rms_norm_eps=1e-5,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16).float()
    return {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


def write_gguf(file: Path, tensors: dict[str, np.ndarray], architecture: str = "llama") -> None:
    """The file that llama.cpp's converter would write: other names, rotary rows interleaved."""
    gguf = pytest.importorskip("gguf")
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(32)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|im_start|>", "<|im_end|>", *alphabet, "12", "ab", "<x>", "<y>"])
    writer.add_token_types([3, 3] + [1] * (len(alphabet) + 2) + [3, 3])
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, values in tensors.items():
        writer.add_tensor(*_named(name, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _named(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    short = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q",
             "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
             "up_proj": "ffn_up", "down_proj": "ffn_down"}
    parts = name.split(".")
    if parts[1] != "layers":
        return {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[1]], values
    kind = short[parts[-2]]
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(kind)
    if heads:
        values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return f"blk.{parts[2]}.{kind}.weight", np.ascontiguousarray(values)


def test_a_gguf_file_becomes_a_directory_once(tmp_path: Path) -> None:
    expected = weights()
    write_gguf(tmp_path / "small.gguf", expected)
    name = f"gguf:{tmp_path / 'small.gguf'}"
    model = load_model(name)
    assert {key: value.shape for key, value in expected.items()} == {
        key: tuple(value.shape) for key, value in model.named_parameters()}
    for key, tensor in model.named_parameters():
        np.testing.assert_array_equal(tensor.detach().numpy(), expected[key], err_msg=key)
    directory = model_directory(name)
    stamp = (directory / "model.safetensors").stat().st_mtime_ns
    assert model_directory(name) == directory and directory.is_relative_to(cache_directory())
    assert (directory / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in directory.parent.iterdir() if path.name.startswith(".")] == []


def test_a_gguf_tokenizer_merges_letters_and_splits_digits(tmp_path: Path) -> None:
    from cosmos_actor.roles.tokenizer import load_tokenizer

    write_gguf(tmp_path / "small.gguf", weights())
    tokenizer = load_tokenizer(f"gguf:{tmp_path / 'small.gguf'}")
    ids = tokenizer.encode("ab12<x>")
    assert len(ids) == 1 + 2 + 1 and tokenizer.decode(ids) == "ab12"
    assert tokenizer.stop_ids == (1,)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", weights(), architecture="mamba")
    with pytest.raises(BadValue, match="mamba"):
        model_directory(f"gguf:{tmp_path / 'other.gguf'}")


def test_a_package_is_found_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "ships_a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('a model needs no code')")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    with pytest.raises(NotFound, match="ships 0 GGUF files"):
        check_model_files("package:ships_a_model")
    write_gguf(package / "small.gguf", weights())
    check_model_files("package:ships_a_model")
    assert (model_directory("package:ships_a_model") / "config.json").is_file()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/no/such/directory", "does not exist"),
        (".", r"no config\.json"),
        ("gguf:/no/such/file.gguf", "does not exist"),
        ("package:no_such_package", "pip install no-such-package"),
    ],
)
def test_what_is_missing_is_named_in_one_line(name: str, why: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for look in (check_model_files, load_model):
        with pytest.raises(NotFound, match=why) as error:
            look(name)
        assert "policy.model" in str(error.value) and "\n" not in str(error.value)


def test_a_directory_is_loaded_in_the_dtype_asked_for(tmp_path: Path) -> None:
    load_model("tiny:qwen3?hidden=32&layers=3&heads=2&kv_heads=1", seed=4).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16")
    assert next(model.parameters()).dtype == torch.bfloat16 and len(blocks_of(model)) == 3
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"


def test_a_tiny_model_is_a_function_of_its_sizes_and_seed() -> None:
    first, again, other = (load_model("tiny:qwen3?hidden=32&layers=1", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight is first.model.embed_tokens.weight
    assert TinySpec.parse("tiny:qwen3") == TinySpec()


@pytest.mark.parametrize(
    ("name", "error", "part"),
    [("tiny:gpt9", UnknownName, "gpt9"), ("tiny:qwen3?width=3", UnknownName, "width"),
     ("tiny:qwen3?hidden=big", BadValue, "hidden"), ("tiny:qwen3?hidden", BadValue, "hidden"),
     ("tiny:qwen3?hidden=0", BadValue, "hidden=0"),
     ("tiny:qwen3?heads=3&hidden=32", BadValue, "no multiple of 2 x heads"),
     ("tiny:qwen3?kv_heads=3", BadValue, "no multiple of kv_heads"), ("tiny:qwen3?layers=²", BadValue, "layers"),
     ("tiny:qwen3?layers=99999999999999", BadValue, "layers")],
)
def test_a_wrong_size_is_named(name: str, error: type[Exception], part: str) -> None:
    for look in (check_model_files, load_model):
        with pytest.raises(error, match=part):
            look(name)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(("name", "damage", "why"), [
    ("config.json", cut, "config.json is damaged"),
    ("config.json", lambda file: file.write_text("[]"), "config.json is damaged: it holds no JSON object"),
    ("config.json", lambda file: file.write_text("{}"), "config.json names no model_type"),
    ("config.json", Path.unlink, "has no config.json"),
    ("model.safetensors", cut, r"has \d+ bytes and should have \d+: fetch it again"),
    ("model.safetensors", lambda file: file.write_bytes(b"\xff" * 9), "is no safetensors file, or cut short"),
    ("model.safetensors", lambda file: file.write_bytes(b""), "is no safetensors file, or cut short"),
    ("model.safetensors", Path.unlink, "has no weights"),
    ("model.safetensors.index.json", lambda file: file.write_text('{"weight_map": {"a": "b.safetensors"}}'),
     "has no b.safetensors, which model.safetensors.index.json names"),
])
def test_a_directory_that_is_not_whole_is_refused_before_anything_starts(tmp_path, name, damage, why) -> None:
    load_model("tiny:qwen3?hidden=32&layers=1&heads=2&kv_heads=1").save_pretrained(tmp_path)
    damage(tmp_path / name)
    for look in (check_model_files, load_model):
        with pytest.raises(UserError, match=why) as error:
            look(str(tmp_path))
        assert "\n" not in str(error.value)


def test_a_family_that_transformers_does_not_know_is_one_line(tmp_path: Path) -> None:
    load_model("tiny:qwen3?hidden=32&layers=1&heads=2&kv_heads=1").save_pretrained(tmp_path)
    with pytest.raises(NotFound, match="no tokenizer.json"):
        check_model_files(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen99"}')
    with pytest.raises(BadValue, match="transformers can not load .*qwen99") as error:
        load_model(str(tmp_path))
    assert "\n" not in str(error.value)


def test_how_many_attention_heads_a_model_has_is_read_without_loading_it(tmp_path: Path) -> None:
    assert attention_heads("tiny:qwen3?heads=2&kv_heads=1") == 2
    assert attention_heads(str(tmp_path)) is None and attention_heads("gguf:nowhere.gguf") is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "num_attention_heads": 14}')
    assert attention_heads(str(tmp_path)) == 14
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    assert attention_heads(str(tmp_path)) is None
