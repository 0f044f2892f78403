"""Two processes that exchange messages over CURVE; Python 3.8 syntax, only what the wheel's core brings.

    python round_trip.py serve KEYS ADDRESS_FILE     answers until its standard input closes
    python round_trip.py ask KEYS ADDRESS_FILE       prints what came back as JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import cosmos_actor
from cosmos_actor.bus import Array, Bus, Identity, KeyRing, ZmqTransport, array, new_incarnation
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.schema import schema

DEADLINE_S = 20.0
RUN_ID = "round-trip"


@schema("observation", version=1)
class Observation:
    step: int
    image: Array = array("uint8", "H", "W", 3)


@schema("action", version=1)
class Action:
    step: int
    python: str
    sums: Array = array("int64", "H")


def python_version() -> str:
    return "{}.{}".format(*sys.version_info[:2])


def answer(observation: Observation, link: Any) -> Action:
    sums = observation.image.astype(np.int64).sum(axis=(1, 2))
    return Action(step=observation.step, python=python_version(), sums=sums)


def bus_of(role: str, keys: str) -> Bus:
    identity = Identity(RUN_ID, role, role + "-0", new_incarnation())
    return Bus(identity, ZmqTransport(), KeyRing.load(Path(keys) / (role + ".key")), bulk=BulkSettings())


async def serve(keys: str, address_file: str) -> None:
    bus = bus_of("simulator", keys)
    bus.serve(Observation, answer)
    address = await bus.start("tcp://127.0.0.1:0")
    Path(address_file + ".new").write_text(address)
    os.replace(address_file + ".new", address_file)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(over.set)), daemon=True).start()
    await over.wait()
    await bus.close()


async def ask(keys: str, address_file: str) -> None:
    bus = bus_of("rollout", keys)
    await bus.start("tcp://127.0.0.1:0")
    link = await bus.connect(Path(address_file).read_text(), role="simulator", deadline_s=DEADLINE_S)
    small = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    large = np.full((256, 256, 3), 7, dtype=np.uint8)  # over the threshold: travels by reference
    called = await link.call(Observation(step=1, image=small), deadline_s=DEADLINE_S)
    receipt = await link.send_work(Observation(step=2, image=large), deadline_s=DEADLINE_S)
    worked = await receipt.result(DEADLINE_S)
    print(json.dumps({
        "asked_by": python_version(), "answered_by": called.python, "package": cosmos_actor.__file__,
        "modules": sorted({name.partition(".")[0] for name in sys.modules}),
        "small": [called.step, called.sums.tolist()], "large": [worked.step, sorted(set(worked.sums.tolist()))],
    }))
    await bus.close()


if __name__ == "__main__":
    asyncio.run({"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:]))
