"""Which linear layers a model has, as far as its files tell before it is loaded. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.trainer.model_directory import GGUF, PACKAGE, gguf_file
from cosmos_actor.trainer.model_files import CONFIGURATION, json_object
from cosmos_actor.trainer.tiny_model import TINY

SETTING = "policy.lora.targets"
HEAD = "lm_head"
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"),
                    SEVEN),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}
"""model_type -> its linear layers but the head, by the last part of their names in transformers. Other families are not
known here, and found out about when the model is loaded."""
GGUF_MAGIC, GGUF_STRING = b"GGUF", 8
ARCHITECTURE = b"general.architecture"
HEADER_BYTES = 256


def check_targets(linear: Mapping[str, bool], targets: Iterable[str]) -> None:
    """`linear`: layer -> whether its matrix is another module's too. Raises BadValue naming the layers there are, when
    a target is none of them, or has no matrix of its own."""
    for target in targets:
        if target not in linear:
            raise BadValue(f"{SETTING} has {target!r}, the model has {', '.join(sorted(linear))}", setting=SETTING)
        if linear[target]:
            raise BadValue(f"{SETTING} has {target!r}, whose matrix the embedding shares: an adapter would be for one "
                           "of the two only", setting=SETTING)


def linear_layers(model: str) -> dict[str, bool] | None:
    """As `check_targets` wants them for policy.model; None where only the loaded model can tell.

    A head counts as having a matrix of its own unless the files say that it is the embedding's.
    """
    if model.startswith(TINY):
        family, tied = "qwen3", True
    elif model.startswith((GGUF, PACKAGE)):
        family, tied = gguf_architecture(gguf_file(model)), False
    elif (Path(model) / CONFIGURATION).is_file():
        known = json_object(Path(model) / CONFIGURATION)
        family, tied = str(known.get("model_type")), known.get("tie_word_embeddings") is True
    else:
        return None
    return {**dict.fromkeys(LAYERS[family], False), HEAD: tied} if family in LAYERS else None


def gguf_architecture(file: Path) -> str:
    """What the first entry of a GGUF file says, where it stands as a rule; otherwise empty.

    magic, version u32, counts of tensors and entries u64; an entry: length u64, name, type u32, length u64, string.
    """
    with file.open("rb") as stream:
        header = stream.read(HEADER_BYTES)
    name_at = 24 + 8
    type_at = name_at + len(ARCHITECTURE)
    if (header[:4] != GGUF_MAGIC or header[name_at:type_at] != ARCHITECTURE
            or int.from_bytes(header[type_at:type_at + 4], "little") != GGUF_STRING):
        return ""
    length = int.from_bytes(header[type_at + 4:type_at + 12], "little")
    return header[type_at + 12:type_at + 12 + length].decode("utf-8", "replace")
