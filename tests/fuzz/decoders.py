"""Every decoder of bytes that somebody else may have written."""

from __future__ import annotations

import logging
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from tests.fuzz import arrays, session, texts, wire
from tests.fuzz.case import Case, opened

NAMES = (
    "msgpack", "envelope and ring places", "lane records", "offers of a ring and a lane", "introductions", "messages",
    "a link that was dialled to us", "a link that we dialled",
    "bulk references", "asks of a stream", "replies of a stream", "returned arrays", "weight manifests",
    "weight deltas",
    "key files", "words of --faults",
)


@cache
def _cases() -> dict[str, Case]:
    return {case.name: case for part in (wire, session, arrays, texts) for case in part.cases()}


def case(name: str) -> Case:
    return _cases()[name]


def seeded(name: str, seed: int) -> random.Random:
    """The choices of one example: the same everywhere and always."""
    return random.Random(f"{name}/{seed}")


@contextmanager
def fuzzing() -> Iterator[None]:
    """Memory is traced, and what the bus logs about corrupt peers stays unsaid."""
    logging.disable(logging.CRITICAL)
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        _cases.cache_clear()
        opened.close()
        logging.disable(logging.NOTSET)
