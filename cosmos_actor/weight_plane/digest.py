"""Content digests of tensors and of whole models: SHA-256, which these processors compute in hardware.

Two mappings have the same digest exactly if they hold the same names with the same dtype, shape and bytes; the order
in which they were put in does not matter. bfloat16 is the dtype of uint16 storage: no model has uint16 weights, and
numpy has no bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np

PARALLEL_BYTES = 8 << 20
"""Below this the threads cost more than they save."""
MAX_THREADS = 8
"""Digests of one model run at memory bandwidth long before they need more."""


def stored(array: np.ndarray) -> tuple[str, np.ndarray]:
    """(dtype name, the same bytes as a contiguous native array), without a copy where it is one already."""
    name = array.dtype.name
    if name in ("bfloat16", "uint16"):
        array, name = array.view(np.uint16), "bfloat16"
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return name, array if array.flags.c_contiguous else np.ascontiguousarray(array)


def raw(array: np.ndarray) -> np.ndarray:
    """[nbytes] uint8 view of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def tensor_digest(array: np.ndarray) -> bytes:
    """32 bytes that change with dtype, shape or any byte of the tensor."""
    name, plain = stored(array)
    return digest_of(name, plain.shape, raw(plain))


def digest_of(dtype: str, shape: Iterable[int], payload: np.ndarray) -> bytes:
    """`tensor_digest` of the tensor with these bytes. payload: [nbytes] uint8."""
    made = hashlib.sha256(json.dumps([dtype, list(shape)]).encode())
    made.update(payload.data)
    return made.digest()


def tensor_digests(tensors: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Name -> `tensor_digest`, on several threads where that is worth it."""
    arrays = list(tensors.values())
    if sum(array.nbytes for array in arrays) < PARALLEL_BYTES:
        digests: Iterable[bytes] = map(tensor_digest, arrays)
    else:
        digests = _threads().map(tensor_digest, arrays)
    return dict(zip(tensors, digests, strict=True))


def weights_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """64 hex digits for a whole model."""
    return combined_digest(tensor_digests(tensors))


def combined_digest(digests: Mapping[str, bytes]) -> str:
    """`weights_digest` from the digests of the tensors."""
    table = [[name, digests[name].hex()] for name in sorted(digests)]
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "digest")
