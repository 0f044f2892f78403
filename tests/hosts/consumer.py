"""The far host's actor: handles numbers, prints each. `consumer.py KEY LISTEN SECONDS_PER_NUMBER LOST_AFTER_S`"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from cosmos_actor.bus import Bus, Identity, KeyRing, Limits, ZmqTransport, new_incarnation
from tests.bus.messages import Number


async def main(key: str, listen: str, pause_s: float, lost_after_s: float) -> None:
    ring = KeyRing.load(key)
    bus = Bus(Identity(ring.run_id, "rollout", "rollout-0", new_incarnation()), ZmqTransport(), ring,
              limits=Limits(lost_after_s=lost_after_s))

    async def work(message: Number, link: Any) -> Number:
        if pause_s:
            await asyncio.sleep(pause_s)
        print(message.value, flush=True)
        return Number(message.value + 1)

    bus.serve(Number, work)
    bus.on_link_down(lambda link, reason: print(f"down {reason}", flush=True))
    print(await bus.start(listen), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await bus.close(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))
