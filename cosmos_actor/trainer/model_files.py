"""Whether a Hugging Face model directory is whole, as far as that can be seen without loading it. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cosmos_actor.actors.errors import BadValue, NotFound

CONFIGURATION = "config.json"
INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000
"""Bytes of a safetensors header; the format's own limit."""


def check_directory(directory: Path) -> None:
    """Raises NotFound or BadValue naming the file that is missing, damaged or cut short."""
    need_directory(directory)
    if "model_type" not in json_object(directory / CONFIGURATION):
        raise BadValue(f"{directory / 'config.json'} names no model_type", setting="policy.model")
    for file in _weight_files(directory):
        if file.suffix == ".safetensors":
            _check_safetensors(file)


def need_directory(directory: Path) -> None:
    """Raises NotFound for what is no model directory at all."""
    if not directory.is_dir():
        raise NotFound(f"model directory {directory} does not exist", setting="policy.model")
    need_file(directory, CONFIGURATION)


def need_file(directory: Path, name: str) -> Path:
    """The file. Raises NotFound naming what the directory lacks."""
    if not (directory / name).is_file():
        raise NotFound(f"model directory {directory} has no {name}", setting="policy.model")
    return directory / name


def _weight_files(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        names = sorted(set(json_object(directory / INDEX).get("weight_map", {}).values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise NotFound(f"model directory {directory} has no {missing[0]}, which {INDEX} names",
                           setting="policy.model")
        return [directory / name for name in names]
    files = sorted([*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")])
    if not files:
        raise NotFound(f"model directory {directory} has no weights (*.safetensors)", setting="policy.model")
    return files


def _check_safetensors(file: Path) -> None:
    """The header says how long the file is."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise BadValue(f"{file} is no safetensors file, or cut short", setting="policy.model")
        header = _parsed(stream.read(length), file)
    try:
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (KeyError, TypeError, IndexError) as error:
        raise BadValue(f"{file} is no safetensors file", setting="policy.model") from error
    if size != expected:
        raise BadValue(f"{file} has {size} bytes and should have {expected}: fetch it again", setting="policy.model")


def json_object(file: Path) -> dict[str, Any]:
    """What the file says. Raises BadValue naming it."""
    return _parsed(file.read_bytes(), file)


def _parsed(text: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadValue(f"{file} is damaged: {error}", setting="policy.model") from error
    if not isinstance(value, dict):
        raise BadValue(f"{file} is damaged: it holds no JSON object", setting="policy.model")
    return value
