"""Messages of the tests. They are read by CPython 3.8 too."""
# ruff: noqa: UP006, UP007, UP035, UP045

from __future__ import annotations

from typing import Any, Dict, List, Optional

from cosmos_actor.bus.schema import Array, Json, array, schema


@schema("test.number", version=1)
class Number:
    value: int
    text: str = ""


@schema("test.fail", version=1)
class Fail:
    text: str


@schema("test.inner", version=1)
class Inner:
    steps: Array = array("float32", "T")


@schema("test.observation", version=2)
class Observation:
    episode: str
    image: Array = array("uint8", "H", "W", 3)
    joints: Array = array("float64", "J")
    limits: Optional[Array] = array("float64", "J", 2, optional=True)
    note: Json = None


@schema("test.everything", version=1)
class Everything:
    flag: bool
    number: int
    ratio: float
    text: str
    blob: bytes
    maybe: Optional[float]
    names: List[str]
    table: Dict[str, int]
    nested: List[Inner]
    arrays: Dict[str, Array]
    payload: Any = array("bfloat16", "N", optional=True)
