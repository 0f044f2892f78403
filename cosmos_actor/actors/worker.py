"""Where a role computes: in one worker thread beside the loop, or inline so that `breakpoint()` works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol


class Worker(Protocol):
    """Runs one piece of compute at a time, in the order of asking."""

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any: ...

    def close(self) -> None: ...


class InlineWorker:
    """Computes on the loop's own thread: nothing else moves meanwhile, and a debugger sees one stack."""

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def close(self) -> None:
        pass


class ThreadWorker:
    """Computes in one thread, so that messages, heartbeats and a stop are served during a long computation.

    What is asked of it once it is closed is cancelled, as what waits then is: an error would be an answer, and whoever
    asked would take it for the work's.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._closed = False

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._closed:
            raise asyncio.CancelledError
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
