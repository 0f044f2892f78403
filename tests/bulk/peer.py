"""One actor in a process of its own, for tests that kill it: `python -m tests.bulk.peer '{"actor": …}'`.

It prints one line of JSON with its address, then one line a phase that it reaches, and stays there until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from cosmos_actor.bus import Bus, KeyRing, Limits, ZmqTransport
from cosmos_actor.bus.bulk import store as store_module
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from tests.bulk.messages import Ask, Batch, Sum
from tests.bulk.tools import identity, pattern


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def stay(phase: str) -> None:
    say(phase=phase)
    await asyncio.Event().wait()


class Peer:
    """Serves Batch (as a consumer) and Ask (as a producer), and stops for ever in the phase it was told to stop in."""

    def __init__(self, actor: str, stop_in: str = "", listen: str = "tcp://127.0.0.1:0", key: str = "",
                 budget_bytes: int = 64 * MIB, **bulk: Any) -> None:
        self._stop_in, self._listen = stop_in, listen
        self._kept: list[Any] = []
        keys = KeyRing.load(key) if key else None
        self.bus = Bus(identity(actor), ZmqTransport(insecure=keys is None), keys,
                       limits=Limits(lost_after_s=2.0, default_deadline_s=60.0),
                       bulk=BulkSettings(budget_bytes=budget_bytes, chunk_bytes=MIB, **bulk))
        self.bus.serve(Batch, self._consume)
        self.bus.serve(Ask, self._produce)
        if stop_in == "before the fetch":
            self.bus.bulk.reader.fetch = lambda ref, **options: stay(stop_in)

    async def run(self) -> None:
        address = await self.bus.start(self._listen)
        say(address=address, incarnation=self.bus.identity.incarnation, pid=os.getpid())
        await asyncio.Event().wait()

    async def _consume(self, batch: Batch, link: Any) -> Sum:
        await self._pass("with a view")
        total = int(batch.image.astype("uint64").sum())
        if self._stop_in == "after the handler":
            self._kept.append(batch)
            say(phase=self._stop_in)
        return Sum(total)

    async def _produce(self, ask: Ask, link: Any) -> Batch:
        await self._pass("before the put")
        if self._stop_in == "in the put":
            store_module.np = Stuck()
        if self._stop_in == "after the send":
            asyncio.get_running_loop().call_later(0.05, lambda: say(phase=self._stop_in))
        return Batch("answer", pattern(ask.size))

    async def _pass(self, phase: str) -> None:
        if self._stop_in == phase:
            await stay(phase)


class Stuck:
    """numpy, with a copy that never ends."""

    def __getattr__(self, name: str) -> Any:
        import numpy

        return getattr(numpy, name)

    def copyto(self, target: Any, source: Any) -> None:
        half = source.size // 2
        target.reshape(-1)[:half] = source.reshape(-1)[:half]
        say(phase="in the put")
        sys.stdin.read()


if __name__ == "__main__":
    asyncio.run(Peer(**json.loads(sys.argv[1])).run())
