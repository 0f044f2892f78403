"""A GGUF file of the llama family as a Hugging Face model directory. Needs gguf, safetensors and tokenizers; no torch.

The quantised weights are expanded and rounded to bfloat16. Left out: other architectures and other tokenizers than
byte-level BPE, which are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.actors.errors import BadValue, NotFound

CONTROL = 3
# The GGUF token type of special tokens.
SHARED = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
          "output.weight": "lm_head.weight"}
IN_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def convert_gguf(file: Path, directory: Path) -> None:
    """Write config, weights, tokenizer and chat template of `file` into the existing, empty `directory`.

    Raises NotFound without the package gguf, BadValue for a model that is not of the llama family.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise NotFound("a GGUF model needs `pip install gguf`", setting="policy.model") from error
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _refuse_others(fields, file)
    config = _config(fields, tied=not any(tensor.name == "output.weight" for tensor in reader.tensors))
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_weights(directory / "model.safetensors", dict(_tensors(reader, config)))
    _write_tokenizer(directory, fields)


def _refuse_others(fields: dict[str, Any], file: Path) -> None:
    for name, known in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if fields.get(name) != known:
            raise BadValue(f"{file} has {name} = {fields.get(name)!r}; only {known!r} is known", setting="policy.model")


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(fields.get("llama.rope.dimension_count", hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0))},
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields.get("tokenizer.ggml.padding_token_id", fields["tokenizer.ggml.eos_token_id"])),
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


def _tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, float32 weights) of every tensor."""
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(int(size) for size in tensor.shape[::-1]))
        if tensor.name in SHARED:
            yield SHARED[tensor.name], values
            continue
        _, block, kind, suffix = tensor.name.split(".")
        values = _unpermuted(values, heads[kind]) if kind in heads else values
        yield f"model.layers.{block}.{IN_BLOCK[kind]}.{suffix}", values


def _unpermuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows in Hugging Face's order of rotary halves; GGUF interleaves them."""
    split = weights.reshape(heads, weights.shape[0] // heads // 2, 2, weights.shape[1])
    return split.swapaxes(1, 2).reshape(weights.shape)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, ties to even, as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_weights(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """The safetensors format by hand: its numpy writer has no bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in tensors.items():
        end = offset + 2 * values.size
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            stream.write(_bfloat16(values).tobytes())


def _write_tokenizer(directory: Path, fields: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if fields.get("tokenizer.ggml.pre") == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [AddedToken(token, special=True) for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
    present = {name: tokens[fields[f"tokenizer.ggml.{key}"]] for name, key in named.items()
               if f"tokenizer.ggml.{key}" in fields}
    extra = {"chat_template": fields.get("tokenizer.chat_template"), "tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(directory / "tokenizer_config.json", present | extra)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")
