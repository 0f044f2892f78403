"""The near host's actor: sends numbers at a rate and prints what became of them. Facts come as JSON in argv[1].

Lines out, one JSON each: {"linked": true}, {"done": N} after each batch, {"lost": reason, "after_s": seconds}, and at
the end {"answered": N, "wires": N, "gaps": N, "longest_s": seconds}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from cosmos_actor.bus import Bus, Identity, KeyRing, Limits, PeerLost, ZmqTransport, new_incarnation
from tests.bus.messages import Number


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class Sender:
    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        ring = KeyRing.load(facts["key"])
        self.bus = Bus(Identity(ring.run_id, "controller", "controller-0", new_incarnation()), ZmqTransport(), ring,
                       limits=Limits(lost_after_s=facts["lost_after_s"]))
        self.longest_s = 0.0
        self.answered = 0

    async def run(self) -> None:
        await self.bus.start(None)
        link = await self.bus.connect(self.facts["address"], role="rollout", deadline_s=30)
        say(linked=True)
        try:
            await self._send_all(link)
        except PeerLost as error:
            say(lost=str(error), after_s=time.monotonic() - link.liveness._heard)
            link = await self._link_again()
            await self._send_all(link)
        say(answered=self.answered, wires=link.wires_used, gaps=self.bus.statistics()["gaps"], longest_s=self.longest_s)
        await self.bus.close(1)

    async def _send_all(self, link: Any) -> None:
        """The numbers that are not answered yet; a batch at a time, with the pause that the facts ask for after it."""
        facts = self.facts
        while self.answered < facts["count"]:
            begun = time.monotonic()
            batch = range(self.answered, min(self.answered + facts["batch"], facts["count"]))
            receipts = [await link.send_work(Number(value)) for value in batch]
            for value, receipt in zip(batch, receipts, strict=True):
                assert (await receipt.result(60)).value == value + 1
            self.answered = batch.stop
            self.longest_s = max(self.longest_s, time.monotonic() - begun)
            say(done=self.answered)
            await asyncio.sleep(facts["pause_s"])

    async def _link_again(self) -> Any:
        ends = time.monotonic() + 30
        while True:
            try:
                return await self.bus.connect(self.facts["address"], role="rollout", deadline_s=3)
            except Exception:
                if time.monotonic() > ends:
                    raise
                await asyncio.sleep(0.2)


if __name__ == "__main__":
    asyncio.run(Sender(json.loads(sys.argv[1])).run())
