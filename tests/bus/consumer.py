"""A rollout in a process of its own: `consumer.py KEYS ACTOR`. Prints its address, then each number it has handled."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from cosmos_actor.bus import Bus, Identity, KeyRing, ZmqTransport, new_incarnation
from tests.bus.messages import Number


async def main(keys: str, actor: str) -> None:
    ring = KeyRing.load(keys)
    bus = Bus(Identity(ring.run_id, "rollout", actor, new_incarnation()), ZmqTransport(), ring)

    async def work(message: Number, link: Any) -> Number:
        await asyncio.sleep(0.001)
        print(message.value, flush=True)
        return Number(message.value + 1)

    bus.serve(Number, work)
    print(await bus.start(), bus.identity.incarnation, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await bus.close(1)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
