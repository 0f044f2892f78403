"""What is left on the loop of a job in one process is ended with it, without a word."""

from __future__ import annotations

import asyncio

from cosmos_actor.job.inproc import _end_tasks


def test_tasks_that_never_began_and_tasks_that_wait_are_ended(recwarn, caplog) -> None:
    loop, ended = asyncio.new_event_loop(), []

    async def wait() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("waited")

    async def begin() -> None:
        waiting = loop.create_task(wait())
        await asyncio.sleep(0)
        assert not waiting.done()

    loop.run_until_complete(begin())
    fresh = loop.create_task(wait())
    _end_tasks(loop)
    loop.close()
    assert fresh.cancelled() and ended == ["waited"]
    assert not recwarn.list and not caplog.records


def test_a_loop_with_nothing_left_is_no_trouble() -> None:
    loop = asyncio.new_event_loop()
    _end_tasks(loop)
    loop.close()
