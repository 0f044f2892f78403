"""A run of its own with nothing to compute: `small_run.py FOLDER RUN_ID`.

A head, and one actor in a child under a supervisor, over ZeroMQ with keys and a bulk plane, at whatever ports are free.
It says what it has as one line of JSON once the actor is ready, and ends when its input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from cosmos_actor import death
from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.context import SystemClock
from cosmos_actor.actors.head import Head
from cosmos_actor.actors.run_directory import RunDirectory
from cosmos_actor.actors.runtime import ActorRuntime
from cosmos_actor.actors.supervisor import Supervisor
from cosmos_actor.actors.worker import InlineWorker
from cosmos_actor.bus import Bus, Identity, KeyRing, ZmqTransport, make_run_keys
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from tests.actors.small_cluster import EchoRole

ANY_PORT = "tcp://127.0.0.1:0"
START_S = 100.0
"""Of the whole run: twenty of them may share two processors."""


def make_bus(keys: Path, role: str, incarnation: str) -> Bus:
    ring = KeyRing.load(keys / f"{role}.key")
    return Bus(Identity(ring.run_id, role, f"{role}-0", incarnation), ZmqTransport(), ring,
               bulk=BulkSettings(budget_bytes=MIB))


async def act(folder: Path, head: str) -> None:
    """The child."""
    bus = make_bus(folder / "keys", "echo", os.environ[death.INCARNATION])
    runtime = ActorRuntime(bus, EchoRole, None, 7, worker=InlineWorker(), clock=SystemClock(), joined=False)
    await runtime.start(head, ANY_PORT)
    runtime.begin()
    await runtime.until_stopped()
    await runtime.close()


async def lead(folder: Path, run_id: str) -> None:
    directory = RunDirectory.create(folder / "run", "digest", run_id=run_id)
    make_run_keys(folder / "keys", run_id, ["registry", "echo"])
    bus = make_bus(folder / "keys", "registry", "1")
    head = Head(bus, {}, 7, on_ready=lambda actor, incarnation: supervisor.mark_ready(actor, incarnation))
    address = await head.start(ANY_PORT)
    command = (sys.executable, "-m", "tests.actors.programs.small_run", str(folder), run_id, address)
    supervisor = Supervisor([ChildSpec(actor="echo-0", role="echo", command=command, start_s=START_S)],
                            run_directory=directory)
    async with supervisor:
        await asyncio.wait_for(supervisor.until_ready(), START_S)
        members = head.registry.membership().members
        addresses = [address, bus.bulk_store.address, *(member.address for member in members)]
        print(json.dumps({"run": run_id, "addresses": addresses,
                          "members": [[member.actor, member.incarnation] for member in members],
                          "children": [child["incarnation"] for child in supervisor.children()]}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await bus.close(1.0)
    directory.close()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        death.install()
        asyncio.run(act(Path(sys.argv[1]), sys.argv[3]))
    else:
        asyncio.run(lead(Path(sys.argv[1]), sys.argv[2]))
