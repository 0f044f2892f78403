"""The other side of `tests.bulk.peer`: prints what it found as one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, Dict, List

import numpy as np

from cosmos_actor.bus import Bus, BusError, KeyRing, Limits, ZmqTransport
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from tests.bulk.messages import Ask, Batch
from tests.bulk.tools import identity, pattern


class Asker:
    def __init__(self, actor: str, listen: str, key: str, **bulk: Any) -> None:
        self.bus = Bus(
            identity(actor), ZmqTransport(), KeyRing.load(key), limits=Limits(default_deadline_s=60.0),
            resolve_bulk=not actor.startswith("controller"), bulk=BulkSettings(budget_bytes=64 * MIB, **bulk))
        self._listen = listen

    async def link(self, address: str, role: str) -> Any:
        if not self.bus.address:
            await self.bus.start(self._listen)
        return await self.bus.connect(address, role=role)

    async def both_ways(self, producer: str, size: int, count: int) -> Dict[str, Any]:
        """Arrays come and go at the same time."""
        link = await self.link(producer, "rollout")
        come = [link.call(Ask(size + n), deadline_s=60.0) for n in range(count)]
        go = [link.call(Batch(str(n), pattern(size)), deadline_s=60.0) for n in range(count)]
        answers = await asyncio.gather(*come, *go)
        equal = [bool(np.array_equal(answers[n].image, pattern(size + n))) for n in range(count)]
        sums = [answer.total == int(pattern(size).astype(np.uint64).sum()) for answer in answers[count:]]
        return {"equal": all(equal), "sums": all(sums), "reader": self.bus.bulk_reader.statistics()}

    async def one(self, producer: str, size: int, deadline_s: float) -> Dict[str, Any]:
        """One array, and how small calls fare meanwhile."""
        link = await self.link(producer, "rollout")
        fetching = asyncio.ensure_future(self._fetch_one(link, size, deadline_s))
        begun, waits = time.monotonic(), []
        while not fetching.done():
            called = time.monotonic()
            await asyncio.wait([asyncio.ensure_future(_small(link)), fetching], return_when=asyncio.FIRST_COMPLETED)
            waits.append(time.monotonic() - called)
        return {"outcome": fetching.result(), "seconds": time.monotonic() - begun, "calls": len(waits),
                "median_call_s": sorted(waits)[len(waits) // 2], "reader": self.bus.bulk_reader.statistics()}

    async def _fetch_one(self, link: Any, size: int, deadline_s: float) -> str:
        self.bus.resolve_bulk = False
        batch = await link.call(Ask(size), deadline_s=60.0)
        print(json.dumps({"phase": "fetching"}), flush=True)
        try:
            found = await self.bus.bulk_reader.fetch(batch.image, deadline_s=deadline_s)
        except BusError as error:
            return f"{type(error).__name__}: {error}"
        return "equal" if np.array_equal(found, pattern(size)) else "other bytes"

    async def pass_on(self, producer: str, consumer: str, size: int) -> Dict[str, Any]:
        """A controller between two actors."""
        links: List[Any] = [await self.link(producer, "rollout"), await self.link(consumer, "policy")]
        batch = await links[0].call(Ask(size), deadline_s=60.0)
        answer = await links[1].call(Batch("passed on", batch.image), deadline_s=60.0)
        await self.bus.release(batch)
        return {"sum": answer.total == int(pattern(size).astype(np.uint64).sum()), "bulk": self.bus.bulk.statistics()}


async def _small(link: Any) -> None:
    await link.call(Batch("small", pattern(100)), deadline_s=60.0)


async def main(mode: str, arguments: Dict[str, Any], **facts: Any) -> None:
    asker = Asker(**facts)
    found = await getattr(asker, mode)(**arguments)
    await asker.bus.close(drain_s=1.0)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
