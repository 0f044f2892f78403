"""Which function handles what, and in which order its messages reach it."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from typing import Any, Awaitable, Callable, Deque, Dict, NamedTuple, Optional, Set

from .errors import BusError
from .schema import schema_key

HandlerFunction = Callable[[Any, Any], Any]


class Handler(NamedTuple):
    """``function(message, link)``; at most `concurrency` of it run at a time for one link."""

    function: HandlerFunction
    is_async: bool
    concurrency: int


class HandlerTable:
    """One handler per message type for work and calls, one per event type, one per topic."""

    def __init__(self) -> None:
        self.requests: Dict[str, Handler] = {}
        self.events: Dict[str, Handler] = {}
        self.topics: Dict[str, Handler] = {}
        self.apart: Set[str] = set()
        """Events that wait for no other event: the bus's own."""

    def add_request(self, message_type: type, function: HandlerFunction, concurrency: int) -> None:
        _put(self.requests, schema_key(message_type)[0], function, concurrency)

    def add_event(self, message_type: type, function: HandlerFunction) -> None:
        _put(self.events, schema_key(message_type)[0], function, 1)

    def add_topic(self, topic: str, function: HandlerFunction) -> None:
        _put(self.topics, topic, function, 1)


def _put(table: Dict[str, Handler], name: str, function: HandlerFunction, concurrency: int) -> None:
    if name in table:
        raise BusError(f"{name} has a handler already")
    if concurrency < 1:
        raise BusError("concurrency must be at least 1")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    table[name] = Handler(function, is_async, concurrency)


class Lane:
    """Jobs start in the order they came; at most `concurrency` of them run at a time."""

    def __init__(self, concurrency: int, run: Callable[[Any], Awaitable[None]], tasks: Set[Any]) -> None:
        self._concurrency = concurrency
        self._run = run
        self._tasks = tasks
        self._queue: Deque[Any] = deque()
        self.active = 0

    def clear(self) -> None:
        self._queue.clear()

    def submit(self, job: Any) -> None:
        if self.active >= self._concurrency:
            self._queue.append(job)
            return
        self.active += 1
        task = asyncio.ensure_future(self._work(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, job: Optional[Any]) -> None:
        try:
            while job is not None:
                await self._run(job)
                job = self._queue.popleft() if self._queue else None
        finally:
            self.active -= 1
