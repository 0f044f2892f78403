"""A stepped engine behind the loop: batches join, a swap that waits finds nothing in flight, what is lost is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cosmos_actor.actors.context import Context, SystemClock
from cosmos_actor.actors.worker import ThreadWorker
from cosmos_actor.bus import Identity
from cosmos_actor.roles.engine import Batch, Completion, EngineError, GenerateItem, PromptTooLong
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.stepping import Stepping

A_MOMENT_S = 0.001
"""Leaves the interpreter to the worker."""


class Counting:
    """An item's answer has as many tokens as its seed says; a step is one token of every sequence."""

    def __init__(self) -> None:
        self.batches: dict[Batch, int] = {}
        self.widths: list[int] = []
        self.dropped = 0
        self.broken: Exception | None = None

    @property
    def in_flight(self) -> bool:
        return bool(self.batches)

    def begin(self, items: Any, sampling: Any) -> Batch:
        if items and items[0].seed == 99:
            raise PromptTooLong("too long")
        batch = Batch(items, sampling)
        if not batch.done:
            self.batches[batch] = 0
        return batch

    def step(self) -> None:
        if self.broken:
            self.batches.clear()
            raise self.broken
        self.widths.append(len(self.batches))
        for batch in list(self.batches):
            self.batches[batch] += 1
            for index, item in enumerate(batch.items):
                if item.seed == self.batches[batch]:
                    batch.end(index, Completion(np.arange(item.seed), np.zeros(item.seed), True, np.zeros(item.seed)))
            if batch.done:
                del self.batches[batch]

    def drop(self, batch: Batch) -> None:
        self.dropped += self.batches.pop(batch, None) is not None


@pytest.fixture
def engine():
    return Counting()


def scene(engine: Counting, play: Any) -> None:
    """`play(stepping)`, to its end, on a loop with a worker beside it."""
    worker = ThreadWorker("test")

    async def run() -> None:
        context = Context(Identity("run", "any", "any-0", "1"), SimpleNamespace(), seed=0, clock=SystemClock(),
                          worker=worker)
        await asyncio.wait_for(play(Stepping(context, engine)), 100)

    asyncio.run(run())
    worker.close()


def ask(stepping: Stepping, *lengths: int) -> asyncio.Task[Any]:
    items = [GenerateItem(np.ones(1, np.int32), length) for length in lengths]
    return asyncio.ensure_future(stepping.generate(items, SamplingSettings()))


def test_batches_join_and_each_is_answered_when_it_has_ended(engine) -> None:
    async def play(stepping: Stepping) -> None:
        long = ask(stepping, 1000, 7)
        while not engine.widths:
            await asyncio.sleep(A_MOMENT_S)
        answers, seconds = await ask(stepping, 3, 2)
        assert [len(answer.tokens) for answer in answers] == [3, 2] and seconds > 0
        assert not long.done() and max(engine.widths) == 2
        answers, more = await long
        assert [len(answer.tokens) for answer in answers] == [1000, 7] and more > seconds
        assert await ask(stepping) == ([], 0.0)

    scene(engine, play)


def test_a_swap_that_waits_finds_nothing_in_flight_and_what_is_asked_for_meanwhile_comes_after(engine) -> None:
    async def play(stepping: Stepping) -> None:
        first = ask(stepping, 300)
        while not engine.in_flight:
            await asyncio.sleep(A_MOMENT_S)
        swapped = asyncio.Event()

        async def swap() -> None:
            async with stepping.drained():
                assert first.done() and not engine.in_flight
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not engine.in_flight and not later.done()
                swapped.set()

        swapping = asyncio.ensure_future(swap())
        await asyncio.sleep(0)
        later = ask(stepping, 2)
        await later
        assert swapped.is_set()
        await swapping

    scene(engine, play)


def test_what_breaks_a_step_is_told_to_all_and_the_next_batch_is_answered(engine) -> None:
    async def play(stepping: Stepping) -> None:
        asked = [ask(stepping, 10_000_000), ask(stepping, 10_000_000)]
        while max(engine.widths, default=0) < 2:
            await asyncio.sleep(A_MOMENT_S)
        engine.broken = RuntimeError("out of memory")
        for one in asked:
            with pytest.raises(RuntimeError, match="out of memory"):
                await one
        engine.broken = None
        with pytest.raises(PromptTooLong):
            await ask(stepping, 99)
        assert len((await ask(stepping, 2))[0]) == 1

    scene(engine, play)


def test_what_a_failed_swap_gave_up_is_told(engine) -> None:
    async def play(stepping: Stepping) -> None:
        asked = ask(stepping, 10_000_000)
        while not engine.widths:
            await asyncio.sleep(A_MOMENT_S)
        engine.batches = {}
        with pytest.raises(EngineError, match="lost when new weights were"):
            await asked

    scene(engine, play)


def test_who_is_cancelled_takes_its_batch_along(engine) -> None:
    async def play(stepping: Stepping) -> None:
        asked = ask(stepping, 10_000_000)
        while not engine.widths:
            await asyncio.sleep(A_MOMENT_S)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert engine.dropped == 1 and not engine.in_flight
        async with stepping.drained():
            pass

    scene(engine, play)


def test_an_engine_that_hangs_ends_its_process_with_the_stacks_of_its_threads() -> None:
    code = ("import time\nfrom cosmos_actor.roles.stepping import within\n"
            "within(60.0, lambda: None)\nwithin(0.2, lambda: time.sleep(60))\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "Timeout (0:00:00.2" in done.stderr and "in within" in done.stderr
