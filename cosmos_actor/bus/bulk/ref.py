"""What travels in the place of a large array."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import numpy as np

from ..codec import DTYPES, MAX_ARRAY_RANK, ArrayReference
from ..errors import BulkCorrupt, BulkError
from ..schema import schema

LAST_GENERATION = 2**62
"""No owner gets there; what is beyond does not fit into an ask for it."""


@schema("bulk_ref", version=1)
class BulkRef(ArrayReference):
    """Names the bytes of one array in its producer's arena. Whoever has it may fetch them while the lease lives.

    It carries a secret: it travels over authenticated links only, and `str` and `repr` leave the secret out.
    """

    run_id: str
    role: str
    owner: str
    """Actor."""
    incarnation: str
    host_id: str
    address: str
    """Of the owner's bulk server, for readers on other hosts; empty: there is none."""
    pid: int
    fd: int
    arena: bytes
    """16 random bytes at the head of the owner's arena: what a reader opened is that arena or is left alone."""
    arena_bytes: int
    offset: int
    """Bytes from the head of the arena; a multiple of the page."""
    nbytes: int
    dtype: str
    shape: Tuple[int, ...]
    generation: int
    """Of the lease; never given twice by one arena."""
    token: bytes
    """Secret of this lease: proves to the bulk server that the asker has the reference, and keys the chunk digests."""
    digest: bytes
    """SHA-256 of the bytes; empty when the producer was not asked for it."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        owner = f"{self.owner}/{self.incarnation[:8]}"
        return f"array {self.generation} of {owner} ({self.dtype} {shape}, {self.nbytes} bytes)"

    def __repr__(self) -> str:
        return f"BulkRef({self})"


def storable(array: Any, dtype: str) -> Tuple[Any, str]:
    """(the array to copy from, the dtype name that travels). Raises BulkError for what cannot be stored.

    `dtype` is empty, or "bfloat16" for an array that holds bfloat16 bits as uint16.
    """
    plain = np.asarray(array)
    name = dtype or plain.dtype.name
    if name == "bfloat16" and plain.dtype.itemsize == 2:
        plain = plain.view(np.uint16)
    if name not in DTYPES or plain.dtype.newbyteorder("=") != DTYPES[name]:
        raise BulkError(f"an array of dtype {plain.dtype} cannot travel as {name}")
    if plain.ndim > MAX_ARRAY_RANK:
        raise BulkError(f"an array of {plain.ndim} dims cannot travel, {MAX_ARRAY_RANK} at most")
    return plain, name


def possible_shape(shape: Sequence[int], itemsize: int) -> bool:
    """Whether numpy can make such an array at all, however much memory there is: it refuses some that are empty."""
    if len(shape) > MAX_ARRAY_RANK:
        return False
    nbytes = itemsize
    for size in shape:
        if size < 0:
            return False
        nbytes *= max(1, size)
    return nbytes < 2**63


def storage_dtype(ref: BulkRef, max_array_bytes: Optional[int] = None) -> Any:
    """The numpy dtype of the stored items.

    Raises BulkCorrupt for a reference that contradicts itself, or to more bytes than whoever reads it takes.
    """
    kind = DTYPES.get(ref.dtype)
    if kind is None or len(ref.shape) > MAX_ARRAY_RANK or any(size < 0 for size in ref.shape):
        raise BulkCorrupt(f"{ref}: no array has this dtype and shape", peer=ref.owner)
    if len(ref.arena) != 16 or not 0 <= ref.generation < LAST_GENERATION:
        raise BulkCorrupt(f"{ref}: no arena has this array", peer=ref.owner)
    items = 1
    for size in ref.shape:
        items *= size
    fits = possible_shape(ref.shape, kind.itemsize) and items * kind.itemsize == ref.nbytes
    if not fits or ref.offset < 0 or ref.offset + ref.nbytes > ref.arena_bytes:
        raise BulkCorrupt(f"{ref}: the size does not follow from dtype, shape and arena", peer=ref.owner)
    if max_array_bytes is not None and ref.nbytes > max_array_bytes:
        raise BulkCorrupt(f"{ref} is larger than {max_array_bytes} bytes", peer=ref.owner,
                          setting="bulk.max_array_bytes")
    return kind
