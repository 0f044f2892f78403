"""An actor that holds its interpreter lock when it is asked: KEYS_FILE HEAD SECONDS pause|no_pause."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from contextlib import nullcontext
from pathlib import Path

from cosmos_actor.actors.context import SystemClock
from cosmos_actor.actors.role import Role, handles
from cosmos_actor.actors.runtime import ActorRuntime, HeadLost
from cosmos_actor.actors.worker import ThreadWorker
from cosmos_actor.bus import Bus, Identity, KeyRing, Limits, ZmqTransport
from tests.actors.small_cluster import Answer, Question

LIMITS = Limits(heartbeat_interval_s=0.5, lost_after_s=3.0)


class HoldingRole(Role):
    @handles(Question)
    def answer(self, question: Question) -> Answer:
        seconds, pause = float(sys.argv[3]), sys.argv[4] == "pause"
        with self.context.busy("a compile", seconds + 20.0) if pause else nullcontext():
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return Answer(question.number, self.context.identity.actor)


async def main() -> None:
    keys = KeyRing.load(Path(sys.argv[1]))
    bus = Bus(Identity("run", "rollout", "rollout-0", "1-holding"), ZmqTransport(), keys, limits=LIMITS)
    runtime = ActorRuntime(bus, HoldingRole, None, 7, worker=ThreadWorker("holding"), clock=SystemClock())
    await runtime.start(sys.argv[2], "tcp://127.0.0.1:0")
    runtime.begin()
    try:
        await runtime.until_stopped()
    except HeadLost:
        pass
    finally:
        await runtime.close()


if __name__ == "__main__":
    asyncio.run(main())
