"""An engine that is brought on a step at a time by the actor's worker, so that others come in between two steps."""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from cosmos_actor.actors.context import Context
from cosmos_actor.roles.engine import Batch, Completion, EngineError, GenerateItem, RolloutEngine
from cosmos_actor.roles.sampling import SamplingSettings


class Stepping:
    """Lives on the loop; every call of the engine is made in the worker, one at a time."""

    def __init__(self, context: Context, engine: RolloutEngine) -> None:
        self._context, self._engine = context, engine
        self._waiting: dict[Batch, asyncio.Future[None]] = {}
        self._seconds: dict[Batch, float] = {}
        self._driving: asyncio.Task[None] | None = None
        self._asked = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    async def generate(self, items: Sequence[GenerateItem], sampling: SamplingSettings
                       ) -> tuple[list[Completion], float]:
        """(one completion an item, in order; this batch's share of the seconds that the engine computed)."""
        while not self._open.is_set():
            await self._open.wait()
        self._asked += 1
        self._idle.clear()
        try:
            return await self._generate(items, sampling)
        finally:
            self._asked -= 1
            if not self._asked:
                self._idle.set()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Nothing is in flight inside; what is asked for meanwhile begins afterwards."""
        self._open.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            self._open.set()

    async def _generate(self, items: Sequence[GenerateItem], sampling: SamplingSettings
                        ) -> tuple[list[Completion], float]:
        begun: list[Batch] = []
        try:
            await self._context.compute("generate", lambda: begun.append(self._engine.begin(items, sampling)))
            [batch] = begun
            if not batch.done:
                await self._brought_on(batch)
            return batch.answers(), self._seconds.pop(batch, 0.0)
        except asyncio.CancelledError:
            await self._context.compute("generate", lambda: [self._engine.drop(batch) for batch in begun])
            raise

    async def _brought_on(self, batch: Batch) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[batch], self._seconds[batch] = done, 0.0
        if self._driving is None:
            self._driving = asyncio.ensure_future(self._drive())
        try:
            await done
        except BaseException:
            del self._seconds[batch]
            raise
        finally:
            self._waiting.pop(batch, None)

    async def _drive(self) -> None:
        """Until nobody waits any more. What a step raises, all who wait are told."""
        try:
            while self._waiting:
                seconds, in_flight = await self._context.compute("generate", self._step)
                share = seconds / len(self._waiting) if self._waiting else 0.0
                for batch, done in list(self._waiting.items()):
                    self._seconds[batch] += share
                    if batch.done:
                        del self._waiting[batch]
                        _tell(done, None)
                if not in_flight:  # nor will be what is not done
                    self._fail(EngineError("what was in flight was lost when new weights were"))
        except Exception as error:
            self._fail(error)
        finally:
            self._driving = None

    def _step(self) -> tuple[float, bool]:
        """(seconds that it took, whether anything is left in flight)."""
        begun = self._context.clock.monotonic()
        self._engine.step()
        return self._context.clock.monotonic() - begun, self._engine.in_flight

    def _fail(self, error: Exception) -> None:
        for done in self._waiting.values():
            _tell(done, error)
        self._waiting.clear()


def _tell(done: asyncio.Future[None], error: Exception | None) -> None:
    if not done.done():  # who waits may have been cancelled
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def within(seconds: float, call: Callable[[], None]) -> None:
    """`call`, or the end of this process with the stacks of its threads in its log: what hangs hears nothing else."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        call()
    finally:
        faulthandler.cancel_dump_traceback_later()
