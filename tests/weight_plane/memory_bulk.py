"""A bulk plane in one dict, for tests of what stands on it: store and reader at once, with hooks to break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.errors import BulkFull, BulkGone


class MemoryBulk:
    """Arrays live from put to the release of their one holder; `on_fetch` sees every array on its way out."""

    def __init__(self, budget_bytes: int = 1 << 30) -> None:
        self.budget_bytes = budget_bytes
        self.arrays: dict[int, np.ndarray] = {}
        self.fetched: list[int] = []
        self.host_id = "h"
        self.on_fetch: Callable[[int, np.ndarray], np.ndarray] = lambda _, array: array
        self._last = 0

    @property
    def used_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def try_put(self, array: Any, *, holder: str) -> BulkRef:
        if self.used_bytes + array.nbytes > self.budget_bytes:
            raise BulkFull(f"no room for {array.nbytes} bytes", setting="bulk.budget_bytes")
        self._last += 1
        self.arrays[self._last] = array.copy()
        return BulkRef(
            run_id="run", role="policy", owner="policy-0", incarnation="0" * 32, host_id=self.host_id, address="",
            pid=1, fd=1,
            arena=bytes(16), arena_bytes=1, offset=0, nbytes=array.nbytes, dtype=array.dtype.name, shape=array.shape,
            generation=self._last, token=b"", digest=b"")

    def release(self, ref: BulkRef, holder: str) -> bool:
        return self.arrays.pop(ref.generation, None) is not None

    @contextmanager
    def reading(self, generation: int) -> Iterator[np.ndarray | None]:
        yield self.arrays.get(generation)

    async def fetch(self, ref: BulkRef, *, deadline_s: float) -> np.ndarray:
        self.check(ref)
        self.fetched.append(ref.generation)
        found = self.on_fetch(ref.generation, self.arrays[ref.generation]).copy()
        found.flags.writeable = False
        return found

    def check(self, ref: BulkRef) -> None:
        if ref.generation not in self.arrays:
            raise BulkGone(f"{ref} ended", peer=ref.owner)
