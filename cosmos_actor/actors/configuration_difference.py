"""Which settings two resolved configurations disagree on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_ABSENT = object()


def differing_keys(one: str, other: str) -> list[str]:
    """The dotted keys, sorted, that two TOML texts do not give the same value; a key that one of them lacks differs."""
    left, right = (dict(_leaves(tomllib.loads(text))) for text in (one, other))
    return sorted(key for key in left.keys() | right.keys() if left.get(key, _ABSENT) != right.get(key, _ABSENT))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
