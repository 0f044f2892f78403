"""Who holds it together, who alone, and in which order."""

from __future__ import annotations

import asyncio

import pytest

from cosmos_actor.roles.shared_or_alone import SharedOrAlone


def test_one_alone_waits_for_those_inside_and_those_that_come_later_wait_for_him() -> None:
    async def scene() -> None:
        lock, happened, leave = SharedOrAlone(), [], asyncio.Event()

        async def together(name: str) -> None:
            async with lock.shared():
                happened.append(f"{name} in")
                await leave.wait()
                happened.append(f"{name} out")

        async def alone() -> None:
            async with lock.alone():
                happened.append("alone in")
                await asyncio.sleep(0)
                happened.append("alone out")

        first = [asyncio.ensure_future(together(name)) for name in "ab"]
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(alone()), asyncio.ensure_future(together("c"))]
        for _ in range(3):
            await asyncio.sleep(0)
        assert happened == ["a in", "b in"]
        leave.set()
        await asyncio.gather(*first, *others)
        assert happened == ["a in", "b in", "a out", "b out", "alone in", "alone out", "c in", "c out"]

    asyncio.run(scene())


@pytest.mark.parametrize("how", ["shared", "alone"])
def test_who_gives_up_or_raises_stands_in_nobodys_way(how: str) -> None:
    async def scene() -> None:
        lock = SharedOrAlone()
        async with lock.shared():
            waiting = asyncio.ensure_future(_enter(lock.alone()))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        with pytest.raises(ZeroDivisionError):
            async with getattr(lock, how)():
                raise ZeroDivisionError
        async with lock.alone():
            pass

    asyncio.run(asyncio.wait_for(scene(), 5.0))


async def _enter(lock) -> None:
    async with lock:
        pass
