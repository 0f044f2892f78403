"""What the tests of the bulk plane share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.identity import Identity, new_incarnation


def identity(actor: str = "rollout-0") -> Identity:
    return Identity("run", actor.rpartition("-")[0], actor, new_incarnation())


@contextmanager
def store(budget_bytes: int = 4 * MIB, actor: str = "rollout-0") -> Iterator[BulkStore]:
    made = BulkStore(identity(actor), BulkSettings(budget_bytes=budget_bytes))
    try:
        yield made
    finally:
        made.close()
