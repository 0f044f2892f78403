"""safetensors files, written and read without the library: a length, a JSON table, the tensors' bytes in a row.

Format: https://huggingface.co/docs/safetensors. Importable without torch or safetensors, which have no numpy bfloat16.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from math import prod
from typing import IO, Any

import numpy as np

from cosmos_actor.bus.bulk.ref import possible_shape
from cosmos_actor.weight_plane.digest import raw, stored
from cosmos_actor.weight_plane.errors import WeightError

KINDS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint64": "U64", "uint32": "U32",
}
"""Our dtype names -> the format's; uint16 is bfloat16 here, as everywhere in the weight plane."""
_NAMES = {kind: name for name, kind in KINDS.items()}
LONGEST_TABLE_BYTES = 100 << 20
"""The library's own limit: a damaged length must not ask for all memory."""
ALIGNMENT_BYTES = 8
_LENGTH = struct.Struct("<Q")


class FileDamaged(WeightError):
    """A file of a version that is not what its manifest or its own table says."""


def write(file: IO[bytes], tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> int:
    """Write all tensors; returns the bytes written. Raises WeightError for a dtype that the format does not have."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    plain: list[np.ndarray] = []
    end = 0
    for name, array in _largest_items_first(tensors):
        dtype, contiguous = stored(array)
        if dtype not in KINDS:
            raise WeightError(f"tensor {name} is {dtype}, which a safetensors file can not hold")
        table[name] = {"dtype": KINDS[dtype], "shape": list(contiguous.shape),
                       "data_offsets": [end, end + contiguous.nbytes]}
        plain.append(contiguous)
        end += contiguous.nbytes
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % ALIGNMENT_BYTES)
    file.write(_LENGTH.pack(len(head)) + head)
    for array in plain:
        file.write(raw(array).data)
    return _LENGTH.size + len(head) + end


def read(file: IO[bytes], what: str) -> dict[str, tuple[str, np.ndarray]]:
    """Name -> (our dtype name, the tensor in memory of its own). Raises FileDamaged naming `what` is cut off or odd."""
    table = _table(file, what)
    found: dict[str, tuple[str, np.ndarray]] = {}
    end = 0
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, kind = _dtype(entry, name, what)
        shape = tuple(entry["shape"])
        first, last = entry["data_offsets"]
        if not possible_shape(shape, kind.itemsize) or last - first != prod(shape) * kind.itemsize or first != end:
            raise FileDamaged(f"{what}: the table has no place for tensor {name}")
        array = np.empty(shape, kind)
        view = raw(array).data
        if file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise FileDamaged(f"{what} is cut off: tensor {name} is not whole")
        found[name], end = (dtype, array), last
    if file.read(1):
        raise FileDamaged(f"{what} goes on after its last tensor")
    return found


def _largest_items_first(tensors: Mapping[str, np.ndarray]) -> Iterable[tuple[str, np.ndarray]]:
    """So that every tensor begins at a multiple of its item's size, as the library writes them too."""
    return sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)


def _table(file: IO[bytes], what: str) -> dict[str, Any]:
    length = file.read(_LENGTH.size)
    size = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else LONGEST_TABLE_BYTES + 1
    head = file.read(size) if size <= LONGEST_TABLE_BYTES else b""
    try:
        table = json.loads(head) if len(head) == size else None
        if isinstance(table, dict):
            table.pop("__metadata__", None)
            for entry in table.values():
                first, last = entry["data_offsets"]
                if not all(type(number) is int for number in (first, last, *entry["shape"])):
                    raise FileDamaged(f"{what}: its table is damaged")
            return table
    except (ValueError, KeyError, TypeError, RecursionError):
        pass  # Told below.
    raise FileDamaged(f"{what} is no whole safetensors file: its table is damaged or cut off")


def _dtype(entry: Mapping[str, Any], name: str, what: str) -> tuple[str, Any]:
    dtype = _NAMES.get(str(entry.get("dtype")))
    if dtype is None:
        raise FileDamaged(f"{what}: tensor {name} has dtype {entry.get('dtype')!r}")
    return dtype, np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
