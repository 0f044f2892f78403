"""A consumer ten times slower than its producer: does the memory of either grow?

    python benchmarks/slow_consumer.py [--messages 30000] [--arrays 20000] [--json FILE]

Two processes, one link, CURVE on. The producer sends as fast as it may. First the consumer keeps up, which says how
fast that is; then it takes a tenth of that, and nine of ten messages have nowhere to go but back to the producer, which
must wait. Both processes' memory (resident, shared memory included) is read from /proc ten times a second. It may rise
until every window is full; it is flat if the highest of the last quarter is no more than BOUND above the highest of the
second. What is left out: streams between hosts, whose windows are per fetch (tests/bulk has them).

    work      1 KiB each, acknowledged when handled: credit of bus.work_window_messages
    events    1 KiB each: credit of bus.event_window_messages
    arrays    128 KiB each, by reference: bulk.budget_bytes, then the put waits
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.bus import Bus, Identity, KeyRing, Limits, ZmqTransport, make_run_keys, new_incarnation
from cosmos_actor.bus.bulk.settings import KIB, MIB, BulkSettings
from cosmos_actor.bus.schema import Array, schema

ROLES = ("policy", "rollout")
SLOWER = 10
PAYLOAD = bytes(KIB)
ARRAY_BYTES = 128 * KIB
BUDGET_BYTES = 32 * MIB
PAGE_INTS = 512
SAMPLE_S = 0.1
PATIENCE_S = 600.0
"""A wait for credit that is longer than a whole measurement is no wait any more."""
BOUND_BYTES = 4 * MIB
"""Above what an allocator does by itself; a queue that took nine of ten messages would hold tens of times as much."""
KINDS = ("work", "events", "arrays")


@schema("slow.note", version=1)
class Note:
    number: int
    payload: bytes


@schema("slow.happened", version=1)
class Happened:
    number: int
    payload: bytes


@schema("slow.picture", version=1)
class Picture:
    number: int
    pixels: Array


@schema("slow.pace", version=1)
class Pace:
    """From now on one message in so many seconds; 0: as they come."""

    period_s: float


@schema("slow.ask_handled", version=1)
class AskHandled:
    pass


@schema("slow.handled", version=1)
class Handled:
    count: int
    out_of_order: int


def make_bus(role: str, keys: str) -> Bus:
    return Bus(Identity("slow", role, f"{role}-0", new_incarnation()), ZmqTransport(),
               KeyRing.load(f"{keys}/{role}.key"), limits=Limits(lost_after_s=60.0),
               bulk=BulkSettings(budget_bytes=BUDGET_BYTES))


# -- the two processes ------------------------------------------------------------------------------------------------


class Consumer:
    """Handles one message in each period, by a schedule, so that a late one is no reason to be slower."""

    def __init__(self) -> None:
        self.period_s = self.due = 0.0
        self.count = self.out_of_order = self.sum = 0

    async def handle(self, message: Any, link: Any) -> None:
        self.out_of_order += message.number != self.count
        self.count += 1
        if isinstance(message, Picture):
            self.sum += int(message.pixels[::PAGE_INTS].sum())  # all of its pages come into this process
        if self.period_s:
            self.due = max(self.due, time.monotonic() - 1.0) + self.period_s
            await asyncio.sleep(max(0.0, self.due - time.monotonic()))

    def pace(self, pace: Pace, link: Any) -> None:
        self.period_s, self.due, self.count = pace.period_s, time.monotonic(), 0


async def consume(bus: Bus) -> None:
    consumer = Consumer()
    for kind in (Note, Picture):
        bus.serve(kind, consumer.handle)
    bus.serve_event(Happened, consumer.handle)
    bus.serve(Pace, consumer.pace)
    bus.serve(AskHandled, lambda ask, link: Handled(consumer.count, consumer.out_of_order))
    print(await bus.start(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await bus.close(1)


class Producer:
    """Says how far it is: `quarter 1` to `quarter 4`, then its figures."""

    def __init__(self, link: Any, kind: str) -> None:
        self.link, self.kind = link, kind
        self.pixels = np.arange(ARRAY_BYTES // 8)

    async def send(self, count: int, *, say: bool = False) -> float:
        """Seconds until all of them were handled."""
        begun = time.perf_counter()
        for number in range(count):
            receipt = await self._send(number)
            if say and (number + 1) % (count // 4) == 0:
                print(f"quarter {(number + 1) // (count // 4)}", flush=True)
        await receipt.result(PATIENCE_S)
        return time.perf_counter() - begun

    async def _send(self, number: int) -> Any:
        if self.kind == "events":
            return await self.link.emit(Happened(number, PAYLOAD), deadline_s=PATIENCE_S)
        message = Picture(number, self.pixels) if self.kind == "arrays" else Note(number, PAYLOAD)
        return await self.link.send_work(message, deadline_s=PATIENCE_S)


async def produce(bus: Bus, address: str, kind: str, messages: int) -> None:
    await bus.start(None)
    producer = Producer(await bus.connect(address, role="rollout", deadline_s=30.0), kind)
    few = max(1000, messages // 10)
    await producer.link.call(Pace(0.0), deadline_s=PATIENCE_S)
    fast = few / await producer.send(few)
    await producer.link.call(Pace(SLOWER / fast), deadline_s=PATIENCE_S)
    print("begun", flush=True)
    slow = messages / await producer.send(messages, say=True)
    handled = await producer.link.call(AskHandled(), deadline_s=PATIENCE_S)
    print(json.dumps({"fast_per_s": fast, "slow_per_s": slow, "handled": handled.count,
                      "out_of_order": handled.out_of_order}), flush=True)
    await bus.close(1)


# -- what is measured -------------------------------------------------------------------------------------------------


def resident(pid: int) -> int:
    """Bytes, or 0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith("VmRSS")), 0)


class Memory:
    """Peaks of two processes, quarter by quarter of the way."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids, self._peaks = pids, {name: [0] for name in pids}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def next_quarter(self) -> None:
        self._look()
        for peaks in self._peaks.values():
            peaks.append(0)

    def close(self) -> dict[str, list[int]]:
        """Bytes: before the slow part began, then a peak for each quarter."""
        self._over.set()
        self._thread.join()
        self._look()
        return {name: peaks[:5] for name, peaks in self._peaks.items()}

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        for name, pid in self._pids.items():
            peaks = self._peaks[name]
            peaks[-1] = max(peaks[-1], resident(pid))


def measure(kind: str, messages: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        make_run_keys(folder, "slow", ROLES)
        consumer = child(stack, "--consume", folder)
        producer = child(stack, "--produce", folder, consumer.stdout.readline().strip(), kind, str(messages))
        memory = Memory({"producer": producer.pid, "consumer": consumer.pid})
        stack.callback(memory.close)
        line = producer.stdout.readline()
        while line and not line.startswith("{"):
            if line.strip() != "quarter 4":  # the rest of the way is the last quarter's
                memory.next_quarter()
            line = producer.stdout.readline()
        peaks = memory.close()
        if not line:
            raise SystemExit(f"{kind}: the producer ended before it was through")
    growth = {name: quarters[4] - quarters[2] for name, quarters in peaks.items()}
    return {"kind": kind, "messages": messages, **json.loads(line), "peaks": peaks, "growth": growth}


def child(stack: ExitStack, *arguments: str) -> Any:
    command = [sys.executable, __file__, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def holds(found: dict[str, Any]) -> bool:
    through = found["handled"] == found["messages"] and not found["out_of_order"]
    slow = found["slow_per_s"] < 2 * found["fast_per_s"] / SLOWER
    return through and slow and all(growth < BOUND_BYTES for growth in found["growth"].values())


def show(found: dict[str, Any]) -> None:
    print(f"{'ok ' if holds(found) else 'NOT'} {found['kind']}: {found['handled']} of {found['messages']} handled at "
          f"{found['slow_per_s']:.0f}/s ({found['fast_per_s']:.0f}/s when nobody waits)")
    for name, quarters in found["peaks"].items():
        peaks = ", ".join(f"{peak / MIB:.1f}" for peak in quarters)
        print(f"      {name:9} MiB before, then a quarter: {peaks}; from the second to the last "
              f"{found['growth'][name] / MIB:+.2f} (bound {BOUND_BYTES / MIB:g})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=30_000, help="of work and of events")
    parser.add_argument("--arrays", type=int, default=20_000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--consume", help=argparse.SUPPRESS)
    parser.add_argument("--produce", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.consume:
        asyncio.run(run(consume, "rollout", options.consume))
        return 0
    if options.produce:
        keys, address, kind, messages = options.produce
        asyncio.run(run(produce, "policy", keys, address, kind, int(messages)))
        return 0
    results = []
    for kind in options.kinds:
        results.append(measure(kind, options.arrays if kind == "arrays" else options.messages))
        show(results[-1])
    if options.json:
        options.json.write_text(json.dumps({"cpus": os.cpu_count(), "results": results}, indent=1) + "\n")
    return 0 if all(map(holds, results)) else 1


async def run(work: Any, role: str, keys: str, *arguments: Any) -> None:
    await work(make_bus(role, keys), *arguments)


if __name__ == "__main__":
    sys.exit(main())
