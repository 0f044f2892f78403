"""Messages of the tests."""

from __future__ import annotations

from typing import Any

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
    limits: Array | None = array("float64", "J", 2, optional=True)
    note: Json = None


@schema("test.everything", version=1)
class Everything:
    flag: bool
    number: int
    ratio: float
    text: str
    blob: bytes
    maybe: float | None
    names: list[str]
    table: dict[str, int]
    nested: list[Inner]
    arrays: dict[str, Array]
    payload: Any = array("bfloat16", "N", optional=True)
