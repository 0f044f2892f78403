"""Heads of a run, for the tests of `doctor` and `check --live`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cosmos_actor.actors.head import Head
from cosmos_actor.bus import Bus, Identity, KeyRing, ZmqTransport, make_run_keys, new_incarnation
from cosmos_actor.job.roles import KEYED_ROLES

RUN = "run-1"


def make_keys(folder: Path, run_id: str = RUN) -> Path:
    """A folder with the key of every role."""
    make_run_keys(folder, run_id, KEYED_ROLES)
    return folder


def forge(key: Path, **changes: Any) -> Path:
    """A copy of a key file that says something else."""
    forged = key.with_name(f"forged-{key.name}")
    forged.write_text(json.dumps({**json.loads(key.read_text()), **changes}))
    forged.chmod(0o600)
    return forged


@asynccontextmanager
async def head(keys: Path, *, role: str = "registry", clock: Callable[[], float] = time.time,
               listen: str = "tcp://127.0.0.1:0", **options: Any) -> AsyncIterator[Head]:
    """A real one, over ZeroMQ, on the running loop; `address` is where it listens."""
    ring = KeyRing.load(keys / f"{role}.key")
    bus = Bus(Identity(ring.run_id, role, f"{role}-0", new_incarnation()), ZmqTransport(), ring, **options)
    made = Head(bus, {}, 0, clock=clock)
    await made.start(listen)
    try:
        yield made
    finally:
        await bus.close(0)


async def beside(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a thread while this loop turns."""
    return await asyncio.get_running_loop().run_in_executor(None, lambda: function(*arguments))
