"""Messages of the tests of the bulk plane. Also read by the oldest Python that the bus runs on."""

from __future__ import annotations

from typing import Any

from cosmos_actor.bus.schema import array, schema


@schema("bulk_test_ask", version=1)
class Ask:
    size: int


@schema("bulk_test_batch", version=1)
class Batch:
    name: str
    image: Any = array("uint8", "N")
    rewards: Any = array("float32", "B", optional=True)


@schema("bulk_test_sum", version=1)
class Sum:
    total: int
