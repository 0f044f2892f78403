"""Waits that never come in time, and what they do to a million messages: nothing.

    python benchmarks/soak.py [--messages 1000000] [--loops asyncio uvloop] [--json FILE]

Two processes, one link, CURVE on. Every message is waited for, and the first wait always ends too soon: most by a
deadline that is over at once, some because the waiting task is cancelled, some inside `asyncio.wait_for`; each is
waited for again until it is done. The receiver grants little credit, so that sending waits as well, and those waits
expire too: such a message was not accepted and is sent again. The receiver looks at every number: none may be missing,
come a second time or out of order. What is left out: broken wires and dying peers (tests/simulation has them).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from cosmos_actor.bus import (
    Bus,
    DeadlineExceeded,
    Identity,
    KeyRing,
    Limits,
    ZmqTransport,
    make_run_keys,
    new_incarnation,
)
from cosmos_actor.bus.schema import schema

CREDIT_MESSAGES = 32
"""Below PENDING, so that the sender runs into it again and again."""
PENDING = 400
EXPIRES_S = 20e-6
PATIENCE_S = 60.0
"""A message that is not done after this long is lost."""
ANSWERED = 16
"""Every so manieth message has an answer, which must be its own."""


@schema("soak.note", version=1)
class Note:
    number: int


@schema("soak.tally", version=1)
class Tally:
    """What the receiver saw."""

    handled: int
    duplicates: int
    out_of_order: int


@schema("soak.ask_tally", version=1)
class AskTally:
    pass


class Receiver:
    """Expects 0, 1, 2, ..; a number below the expected one is a duplicate, one above it is out of order."""

    def __init__(self) -> None:
        self.expected = self.handled = self.duplicates = self.out_of_order = 0

    def note(self, note: Note, link: Any) -> Note | None:
        self.handled += 1
        self.duplicates += note.number < self.expected
        self.out_of_order += note.number > self.expected
        self.expected = max(self.expected, note.number + 1)
        return None if note.number % ANSWERED else note

    def tally(self, ask: AskTally, link: Any) -> Tally:
        return Tally(self.handled, self.duplicates, self.out_of_order)


async def receive(keys: KeyRing) -> None:
    receiver = Receiver()
    bus = Bus(Identity("soak", "policy", "policy-0", new_incarnation()), ZmqTransport(), keys,
              limits=Limits(work_window_messages=CREDIT_MESSAGES, lost_after_s=60.0))
    bus.serve(Note, receiver.note)
    bus.serve(AskTally, receiver.tally)
    print(await bus.start(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await bus.close(1)


class Sender:
    """Sends, gives up waiting, and comes back, until everything is done."""

    def __init__(self, link: Any, seed: int) -> None:
        self.link = link
        self.choose = random.Random(seed)
        self.pending: deque[tuple[int, Any]] = deque()
        self.count: Counter[str] = Counter()

    async def send(self, number: int) -> None:
        receipt = await self._accepted(number)
        how = self.choose.random()
        if how < 0.8:
            await self._too_soon(receipt, 0.0)
        elif how < 0.9:
            await self._cancelled(receipt)
        else:
            await self._wait_for(receipt)
        self.pending.append((number, receipt))
        if len(self.pending) >= PENDING:
            await self.settle(*self.pending.popleft())

    async def settle(self, number: int, receipt: Any) -> None:
        """Wait again and again, each time too short, until it is done; its answer must be its own."""
        until = time.monotonic() + PATIENCE_S
        while not receipt.done:
            await self._too_soon(receipt, EXPIRES_S)
            if time.monotonic() > until:
                self.count["lost"] += 1
                return
        answer = await receipt.result(0.0)
        right = answer is None if number % ANSWERED else answer.number == number
        self.count["done" if right else "wrong_answers"] += 1

    async def _accepted(self, number: int) -> Any:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await self.link.send_work(Note(number), deadline_s=EXPIRES_S)
            except DeadlineExceeded:
                self.count["expired_sends"] += 1
                if time.monotonic() > until:
                    raise

    async def _too_soon(self, receipt: Any, deadline_s: float) -> None:
        try:
            await receipt.result(deadline_s)
        except DeadlineExceeded:
            self.count["expired_waits"] += 1

    async def _cancelled(self, receipt: Any) -> None:
        waiting = asyncio.ensure_future(receipt.result(PATIENCE_S))
        await asyncio.sleep(0)
        if waiting.cancel():
            self.count["cancelled_waits"] += 1
        await asyncio.wait([waiting])

    async def _wait_for(self, receipt: Any) -> None:
        try:
            await asyncio.wait_for(receipt.result(PATIENCE_S), EXPIRES_S)
        except asyncio.TimeoutError:
            self.count["wait_for_timeouts"] += 1


async def send(address: str, keys: KeyRing, messages: int) -> dict[str, Any]:
    bus = Bus(Identity("soak", "controller", "controller-0", new_incarnation()), ZmqTransport(), keys,
              limits=Limits(lost_after_s=60.0))
    await bus.start(None)
    link = await bus.connect(address, role="policy")
    sender, begun = Sender(link, messages), time.perf_counter()
    for number in range(messages):
        await sender.send(number)
    while sender.pending:
        await sender.settle(*sender.pending.popleft())
    seconds = time.perf_counter() - begun
    tally = await link.call(AskTally(), deadline_s=PATIENCE_S)
    left = (await bus.close(5)).undelivered
    lost = messages - (tally.handled - tally.duplicates)
    return {"messages": messages, "seconds": round(seconds, 1), "messages_per_s": round(messages / seconds),
            "lost": max(lost, sender.count["lost"]), "duplicates_handled": tally.duplicates,
            "out_of_order": tally.out_of_order, "wrong_answers": sender.count["wrong_answers"],
            "undelivered": sum(left.values()), "done": sender.count["done"],
            **{name: sender.count[name] for name in ("expired_waits", "cancelled_waits", "wait_for_timeouts",
                                                     "expired_sends")}}


def run_on(loop: str, coroutine: Any) -> Any:
    if loop == "uvloop":
        import uvloop

        return uvloop.run(coroutine)
    return asyncio.run(coroutine)


def soak(loop: str, messages: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        make_run_keys(folder, "soak", ["policy", "controller"])
        command = [sys.executable, __file__, "--receive", folder, "--loops", loop]
        receiver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            address = receiver.stdout.readline().strip()
            found = run_on(loop, send(address, KeyRing.load(f"{folder}/controller.key"), messages))
        finally:
            receiver.kill()
            receiver.communicate()
    return {"python": platform.python_version(), "loop": loop, **found}


def holds(found: dict[str, Any]) -> bool:
    wrong = ("lost", "duplicates_handled", "out_of_order", "wrong_answers", "undelivered")
    return found["done"] == found["messages"] and not any(found[name] for name in wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--loops", nargs="+", choices=("asyncio", "uvloop"), default=["asyncio", "uvloop"])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        run_on(options.loops[0], receive(KeyRing.load(f"{options.receive}/policy.key")))
        return 0
    results = []
    for loop in options.loops:
        results.append(soak(loop, options.messages))
        print("ok " if holds(results[-1]) else "NOT", " ".join(f"{key}={value}" for key, value in results[-1].items()),
              flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(map(holds, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
