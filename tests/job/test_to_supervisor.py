"""What the registry has for the supervisor: nothing is lost while that is away, and nothing piles up."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

from cosmos_actor.actors.messages import Heard, KillOrder, Warned
from cosmos_actor.bus import PeerLost
from cosmos_actor.job import registry
from cosmos_actor.job.registry import ToSupervisor


class Supervisor:
    """One end of a link that may fail; what it was told."""

    def __init__(self, fail: int = 0) -> None:
        self.told: list[Any] = []
        self._fail = fail

    async def emit(self, message: Any, *, deadline_s: float) -> Any:
        if self._fail:
            self._fail -= 1
            raise PeerLost("gone")
        return SimpleNamespace(result=partial(self._heard, message))

    async def _heard(self, message: Any, deadline_s: float) -> None:
        self.told.append(message)


def heard(progress: str) -> Heard:
    return Heard("data-0", "1-a", "ready", progress, 0.0)


def told(words: ToSupervisor, supervisor: Supervisor, count: int) -> list[Any]:
    """What it has heard once `count` words have come, from the moment that it is linked."""
    async def run() -> None:
        bus = SimpleNamespace(links={})
        telling = asyncio.ensure_future(words.tell(bus))
        await asyncio.sleep(0)
        bus.links["supervisor-0"] = supervisor
        words.again()
        async with asyncio.timeout(5.0):
            while len(supervisor.told) < count:
                await asyncio.sleep(0.001)
        telling.cancel()

    asyncio.run(run())
    return supervisor.told


def test_of_two_words_about_an_actor_the_newer_is_told_and_an_order_is_told_as_well():
    words, order = ToSupervisor(), KillOrder("data-0", "1-a", "stuck")
    words.put(("heard", "data-0"), heard("1"))
    words.put(("kill", "data-0"), order)
    words.put(("heard", "data-0"), heard("2"))
    assert told(words, Supervisor(), 2) == [heard("2"), order]


def test_what_could_not_be_told_is_told_once_more(monkeypatch):
    monkeypatch.setattr(registry, "TELL_PAUSE_S", 0.001)
    words = ToSupervisor()
    words.put(("kill", "data-0"), KillOrder("data-0", "1-a", "stuck"))
    assert told(words, Supervisor(fail=3), 1) == [KillOrder("data-0", "1-a", "stuck")]


def test_words_for_one_who_never_comes_have_a_bound(monkeypatch):
    monkeypatch.setattr(registry, "MOST_PENDING", 3)
    words = ToSupervisor()
    for number in range(10):
        words.put(("warned", number), Warned(str(number)))
    words.put(("heard", "data-0"), heard("1"))
    assert told(words, Supervisor(), 4) == [*(Warned(str(number)) for number in range(3)), heard("1")]
    assert words.dropped == 7, "warnings only: of the rest there is one an actor"
