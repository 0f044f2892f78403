"""The event loop of an actor's bus: uvloop where it is installed, else asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

try:
    import uvloop
except ImportError:
    uvloop = None

Result = TypeVar("Result")


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run."""
    return uvloop.run(coroutine) if uvloop is not None else asyncio.run(coroutine)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """As asyncio.new_event_loop."""
    return uvloop.new_event_loop() if uvloop is not None else asyncio.new_event_loop()
