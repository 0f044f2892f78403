"""What the tests of the bulk plane share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.bulk.server import BulkServer
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.bulk.streams import StreamClient
from cosmos_actor.bus.identity import Identity, new_incarnation
from cosmos_actor.bus.keys import KeyRing


def identity(actor: str = "rollout-0") -> Identity:
    return Identity("run", actor.rpartition("-")[0], actor, new_incarnation())


@contextmanager
def store(
    budget_bytes: int = 4 * MIB, actor: str = "rollout-0", settings: BulkSettings | None = None
) -> Iterator[BulkStore]:
    made = BulkStore(identity(actor), replace(settings or BulkSettings(), budget_bytes=budget_bytes))
    try:
        yield made
    finally:
        made.close()


@contextmanager
def served(made: BulkStore, keys: KeyRing | None = None, listen: str = "tcp://127.0.0.1:0") -> Iterator[BulkServer]:
    server = BulkServer(made, keys)
    server.start(listen)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def reader(settings: BulkSettings | None = None, keys: KeyRing | None = None) -> Iterator[BulkReader]:
    settings = settings or BulkSettings(chunk_bytes=MIB)
    made = BulkReader(settings, StreamClient(settings, keys))
    try:
        yield made
    finally:
        made.close()


def elsewhere(ref: BulkRef, **changes: Any) -> BulkRef:
    """The reference as a reader on another host sees it: the arena cannot be mapped."""
    return replace(ref, **{"host_id": "another", **changes})


def pattern(nbytes: int) -> np.ndarray:
    """Bytes of which every part is different."""
    return np.arange(-(-nbytes // 4), dtype=np.uint32).view(np.uint8)[:nbytes]
