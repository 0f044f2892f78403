"""Many actors with one head, on this machine: what registration, heartbeats and status cost.

    python benchmarks/scale.py [--actors 1000] [--processes 4] [--json FILE]

The head is the real one. The actors are light: a bus each with keys, the announcement, a status every second and the
membership that everybody follows, but no role. They live as tasks in a few processes. What is left out: a network, and
the links between actors (those do not pass the head).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cosmos_actor.actors.event_loop import run
from cosmos_actor.actors.head import Head
from cosmos_actor.actors.messages import MEMBERSHIP_TOPIC, READY, STATUS_TOPIC, ActorStatus, Announce
from cosmos_actor.bus import Bus, Identity, KeyRing, Limits, ZmqTransport, make_run_keys, new_incarnation

WATCHED_S = 15.0
ANNOUNCE_S = 300.0
AT_ONCE = 16
"""Actors of one process that introduce themselves at a time, as hosts of a cluster that starts do."""


async def live(keys: str, head: str, first: int, count: int) -> None:
    """One process of light actors; a line when all are in, then until stdin closes."""
    ring = KeyRing.load(keys)
    gate = asyncio.Semaphore(AT_ONCE)
    known: dict[str, int] = {}
    buses = await asyncio.gather(*(_join(ring, head, first + index, gate, known) for index in range(count)))
    print("in", flush=True)
    reporting = [asyncio.ensure_future(_report(link)) for _, link in buses]
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print(json.dumps({"least_known": min(known.values())}), flush=True)
    for task in reporting:
        task.cancel()
    os._exit(0)


async def _join(ring: KeyRing, head: str, number: int, gate: asyncio.Semaphore, known: dict[str, int]) -> Any:
    name = f"rollout-{number}"
    bus = Bus(Identity(ring.run_id, "rollout", name, new_incarnation()), ZmqTransport(), ring,
              limits=Limits(lost_after_s=120.0, shared_bytes=0))

    def follow(message: Any, link: Any) -> None:
        known[name] = len(message.members)

    bus.serve_state(MEMBERSHIP_TOPIC, follow)
    async with gate:
        await bus.start(None)
        link = await bus.connect(head, role="registry", deadline_s=ANNOUNCE_S)
        await link.call(Announce(f"tcp://10.0.{number // 250}.{number % 250}:5555", os.getpid(), sys.executable,
                                 f"host-{number}", False), deadline_s=ANNOUNCE_S)
    return bus, link


async def _report(link: Any) -> None:
    progress = 0
    while True:
        progress += 1
        link.publish_state(ActorStatus(READY, progress, "", 0.0, ""), STATUS_TOPIC)
        await asyncio.sleep(1.0)


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(folder: Path, actors: int, processes: int) -> dict[str, Any]:
    statuses = 0

    def count(actor: str, incarnation: str, status: ActorStatus) -> None:
        nonlocal statuses
        statuses += 1

    bus = Bus(Identity("scale", "registry", "registry-0", new_incarnation()), ZmqTransport(),
              KeyRing.load(folder / "registry.key"), limits=Limits(lost_after_s=120.0, shared_bytes=0))
    head = Head(bus, {}, 0, status_path=folder / "status.json", clock=time.time, on_status=count)
    address = await head.start("tcp://127.0.0.1:0")
    begun, used = time.perf_counter(), processor_s()
    share = -(-actors // processes)
    crowds = [
        subprocess.Popen([sys.executable, __file__, "--live", address, "--keys", str(folder / "rollout.key"), "--first",
                          str(first), "--actors", str(min(share, actors - first))],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for first in range(0, actors, share)
    ]
    loop = asyncio.get_running_loop()
    try:
        for crowd in crowds:
            assert (await loop.run_in_executor(None, crowd.stdout.readline)).strip() == "in"  # type: ignore[union-attr]
        registered_s, registering_cpu_s = time.perf_counter() - begun, processor_s() - used
        while sum(member.ready for member in head.registry.membership().members) < actors:
            await asyncio.sleep(0.1)
        await asyncio.sleep(5.0)
        statuses, used, begun = 0, processor_s(), time.perf_counter()
        await asyncio.sleep(WATCHED_S)
        watched_s = time.perf_counter() - begun
        watching_cpu_s, heard = processor_s() - used, statuses
        begun = time.perf_counter()
        head.write_status({})
        written_s = time.perf_counter() - begun
        least = []
        for crowd in crowds:
            crowd.stdin.write("end\n")  # type: ignore[union-attr]
            crowd.stdin.flush()  # type: ignore[union-attr]
            least.append(json.loads(await loop.run_in_executor(None, crowd.stdout.readline))["least_known"])  # type: ignore[union-attr]
    finally:
        for crowd in crowds:
            crowd.kill()
            crowd.communicate()
    return {
        "actors": actors, "registered_s": registered_s, "head_cpu_registering_s": registering_cpu_s,
        "statuses_per_s": heard / watched_s, "head_cpu_share": watching_cpu_s / watched_s,
        "head_cpu_us_per_actor_second": watching_cpu_s / watched_s / actors * 1e6, "write_status_ms": 1000 * written_s,
        "status_bytes": (folder / "status.json").stat().st_size, "least_members_known": min(least),
        "head_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "cpus": os.cpu_count(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--json", type=Path)
    for hidden in ("--live", "--keys"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.live:
        run(live(options.keys, options.live, options.first, options.actors))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run_keys(folder, "scale", ["registry", "rollout"])
        result = run(measure(folder, options.actors, options.processes))
    for figure, value in result.items():
        print(f"{figure:32}{value:12.3f}" if isinstance(value, float) else f"{figure:32}{value:12}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 0 if result["least_members_known"] == result["actors"] else 1


if __name__ == "__main__":
    sys.exit(main())
