"""Control beside bulk: does a stop command wait behind a gigabyte, and do small calls notice it?

    python benchmarks/control.py [--plain] [--json FILE]

Three processes, CURVE on (`--plain`: not for the bulk streams), as if each was a host of its own: no shared memory, all
over TCP on the loopback. The owner keeps arrays, the reader fetches them as streams, the controller calls both.

    stop     1 GiB is queued at the reader and on its way; a stop command is called; how long until its handler runs.
             The clocks of two processes of one machine are one.
    calls    small round trips to owner and reader by turns, in blocks without and with a stream at full speed, so that
             other load on the machine meets both.

Full speed on few processors says more about these than about the bus: the streams keep three threads busy, and a call
that finds no free processor waits for the scheduler. So each figure stands beside the one without streams, and beside
the one with as many threads that only compute, at the streams' priority.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.bus import (
    Bus,
    Identity,
    KeyRing,
    Limits,
    ZmqTransport,
    decode,
    encode,
    make_run_keys,
    new_incarnation,
)
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.schema import schema

ROLES = ("policy", "rollout", "controller")
ARRAY_BYTES, ARRAYS = 64 * MIB, 16
STOPS, BLOCKS, BLOCK_S = 5, 6, 3.0
BUSY_THREADS = 3
STOP_BOUND_S, P99_BOUND = 0.1, 1.5
QUIET_S = 60.0
"""Streams may keep a process from its heartbeats on a machine that is too small; that is not what this measures."""


@schema("control.make", version=1)
class Make:
    """Keep this many arrays of this many bytes."""

    arrays: int
    nbytes: int


@schema("control.made", version=1)
class Made:
    references: list[bytes]


@schema("control.pull", version=1)
class Pull:
    """Fetch all of these at the same time; `again`: over and over."""

    references: list[bytes]
    again: bool


@schema("control.stop", version=1)
class Stop:
    pass


@schema("control.stopped", version=1)
class Stopped:
    at: float
    """time.monotonic() when the handler began."""


@schema("control.sent", version=1)
class Sent:
    nbytes: int
    """That the owner has sent since it began."""


@schema("control.ask_sent", version=1)
class AskSent:
    pass


@schema("control.ping", version=1)
class Ping:
    pass


# -- the three processes ----------------------------------------------------------------------------------------------


def make_bus(role: str, keys: str, plain: bool) -> Bus:
    ring = KeyRing.load(f"{keys}/{role}.key")
    bulk = BulkSettings(budget_bytes=(ARRAYS + 1) * ARRAY_BYTES, encrypt=not plain)
    return Bus(Identity("control", role, f"{role}-0", new_incarnation()), ZmqTransport(), ring,
               limits=Limits(shared_bytes=0, lost_after_s=QUIET_S), bulk=bulk, resolve_bulk=False)


async def serve(bus: Bus) -> None:
    bus.serve(Ping, lambda ping, link: ping)
    print(await bus.start(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def own(bus: Bus) -> None:
    def make(make: Make, link: Any) -> Made:
        array = np.arange(make.nbytes // 8)
        refs = [bus.bulk_store.try_put(array, holder="benchmark") for _ in range(make.arrays)]
        return Made([encode(replace(ref, host_id="another"))[0] for ref in refs])

    bus.serve(Make, make)
    bus.serve(AskSent, lambda ask, link: Sent(bus.bulk.statistics()["server"]["chunk_bytes"]))
    await serve(bus)


class Reader:
    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.pulls: list[Any] = []
        bus.serve(Pull, self.pull)
        bus.serve(Stop, self.stop)

    def pull(self, pull: Pull, link: Any) -> None:
        self.pulls = [asyncio.ensure_future(self._fetch(reference, pull.again)) for reference in pull.references]

    async def stop(self, stop: Stop, link: Any) -> Stopped:
        found = Stopped(time.monotonic())
        for pull in self.pulls:
            pull.cancel()
        await asyncio.gather(*self.pulls, return_exceptions=True)
        return found

    async def _fetch(self, reference: bytes, again: bool) -> None:
        while True:
            await self.bus.bulk_reader.fetch(decode(reference, []), deadline_s=600.0)
            if not again:
                return


async def read(bus: Bus) -> None:
    reader = Reader(bus)
    await serve(bus)
    await reader.stop(Stop(), None)


# -- what is measured -------------------------------------------------------------------------------------------------


async def sent_bytes(owner: Any) -> int:
    return int((await owner.call(AskSent(), deadline_s=QUIET_S)).nbytes)


async def stops(owner: Any, reader: Any, references: list[bytes]) -> list[dict[str, float]]:
    found = []
    for number in range(STOPS):
        before = await sent_bytes(owner)
        await reader.call(Pull(references, False), deadline_s=QUIET_S)
        await asyncio.sleep(0.1 * number)  # behind all of it, and in its midst
        begun = time.monotonic()
        stopped = await reader.call(Stop(), deadline_s=QUIET_S)
        found.append({"arrived_s": stopped.at - begun, "bytes_before": await sent_bytes(owner) - before})
    return found


async def calls(links: list[Any], seconds: float) -> list[float]:
    took, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        for link in links:
            begun = time.perf_counter()
            await link.call(Ping(), deadline_s=QUIET_S)
            took.append(time.perf_counter() - begun)
        await asyncio.sleep(0.002)
    return took


class Busy:
    """Processes that only compute: what the machine does to calls when something else is at work."""

    def __init__(self) -> None:
        work = "x = 0\nwhile True: x += 1"
        self._processes = [subprocess.Popen([sys.executable, "-c", work]) for _ in range(BUSY_THREADS)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


async def beside(owner: Any, reader: Any, references: list[bytes]) -> dict[str, Any]:
    links = [owner, reader]
    times: dict[str, list[float]] = {"idle": [], "bulk": [], "busy": []}
    before, moving_s = await sent_bytes(owner), 0.0
    for _ in range(BLOCKS):
        times["idle"] += await calls(links, BLOCK_S)
        begun = time.monotonic()
        await reader.call(Pull(references, True), deadline_s=QUIET_S)
        times["bulk"] += await calls(links, BLOCK_S)
        await reader.call(Stop(), deadline_s=QUIET_S)
        moving_s += time.monotonic() - begun
        busy = Busy()
        times["busy"] += await calls(links, BLOCK_S)
        busy.close()
    quantiles = {name: dict(zip(("p50_s", "p99_s"), map(float, np.percentile(took, [50, 99])), strict=True))
                 for name, took in times.items()}
    return {**{name: {**quantiles[name], "calls": len(took)} for name, took in times.items()},
            "bulk_gb_s": (await sent_bytes(owner) - before) / moving_s / 1e9}


async def measure(addresses: dict[str, str], keys: str, plain: bool) -> dict[str, Any]:
    bus = make_bus("controller", keys, plain)
    await bus.start(None)
    owner = await bus.connect(addresses["policy"], role="policy", deadline_s=QUIET_S)
    reader = await bus.connect(addresses["rollout"], role="rollout", deadline_s=QUIET_S)
    references = (await owner.call(Make(ARRAYS, ARRAY_BYTES), deadline_s=QUIET_S)).references
    found = {"stops": await stops(owner, reader, references), "calls": await beside(owner, reader, references)}
    await bus.close(1)
    return found


# -- the report -------------------------------------------------------------------------------------------------------


def verdicts(found: dict[str, Any]) -> dict[str, tuple[float, str, bool]]:
    slowest = max(stop["arrived_s"] for stop in found["stops"])
    moved = found["calls"]["bulk"]["p99_s"] / found["calls"]["idle"]["p99_s"]
    return {f"slowest stop behind {ARRAYS * ARRAY_BYTES >> 30} GiB, s": (slowest, f"< {STOP_BOUND_S:g}",
                                                                        slowest < STOP_BOUND_S),
            "p99 of calls, times the idle one": (moved, f"< {P99_BOUND:g}", moved < P99_BOUND)}


def show(found: dict[str, Any]) -> None:
    for stop in found["stops"]:
        before = f"{stop['bytes_before'] / 1e6:6.0f} MB were sent before"
        print(f"stop arrived after {stop['arrived_s'] * 1e3:6.1f} ms, {before}")
    names = {"idle": "alone", "bulk": f"beside streams at {found['calls']['bulk_gb_s']:.2f} GB/s",
             "busy": f"beside {BUSY_THREADS} processes that compute"}
    print(f"{'calls':36}{'p50 us':>10}{'p99 us':>10}{'calls':>9}")
    for name, text in names.items():
        row = found["calls"][name]
        print(f"{text:36}{row['p50_s'] * 1e6:10.0f}{row['p99_s'] * 1e6:10.0f}{row['calls']:9}")


def benchmark(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        make_run_keys(folder, "control", ROLES)
        addresses = {}
        for role in ("policy", "rollout"):
            command = [sys.executable, __file__, "--serve", role, "--keys", folder, *["--plain"] * options.plain]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            addresses[role] = process.stdout.readline().strip()
        found = asyncio.run(measure(addresses, folder, options.plain))
    found["cpus"], found["load"] = os.cpu_count(), os.getloadavg()[0]
    show(found)
    found["checks"] = verdicts(found)
    for name, (value, bound, holds) in found["checks"].items():
        print(f"{'ok ' if holds else 'NOT'} {name}: {value:.3f} ({bound})")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(holds for _, _, holds in found["checks"].values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="streams without CURVE")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--serve", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.serve:
        return benchmark(options)
    work = {"policy": own, "rollout": read}[options.serve]

    async def run() -> None:
        await work(make_bus(options.serve, options.keys, options.plain))

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
