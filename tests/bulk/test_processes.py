"""Two real processes and `kill -9`: whatever dies and when, no memory is left and the budget is whole again."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_actor.bus import Bus, Limits, ZmqTransport
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.errors import BulkGone, PeerLost
from tests.bulk.messages import Ask, Batch
from tests.bulk.tools import elsewhere, identity, pattern
from tests.waiting import eventually

SIZE = 8 * MIB


class Peer:
    """A `tests.bulk.peer` in its process."""

    def __init__(self, popen: Callable[..., Any], **facts: Any) -> None:
        command = [sys.executable, "-m", "tests.bulk.peer", json.dumps(facts)]
        self.process = popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        self.facts = self.next_line()

    def next_line(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait(5)}"
        return json.loads(line)

    async def reaches(self, phase: str) -> None:
        line = await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, self.next_line), 20.0)
        assert line == {"phase": phase}

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(5)


def ours(actor: str, **options: Any) -> Bus:
    return Bus(identity(actor), ZmqTransport(insecure=True), None, limits=Limits(lost_after_s=2.0),
               bulk=BulkSettings(budget_bytes=2 * SIZE, chunk_bytes=MIB, **options))


@pytest.fixture(autouse=True)
def no_memory_left() -> Any:
    """The peers are dead by now; this process has no arena and no file names one."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before
    gc.collect()
    assert "memfd:cosmos-actor-bulk" not in Path("/proc/self/maps").read_text()


CONSUMER_PHASES = ["before the fetch", "with a view", "after the handler", "in the stream"]


@pytest.mark.parametrize("phase", CONSUMER_PHASES)
def test_a_killed_consumer_gives_its_budget_back_in_every_phase(phase: str, popen: Callable[..., Any]) -> None:
    consumer = Peer(popen, actor="policy-0", stop_in=phase, budget_bytes=SIZE)

    async def main() -> None:
        producer = ours("rollout-0")
        await producer.start()
        if phase == "in the stream":
            stop_in_the_stream(producer)
        link = await producer.connect(consumer.facts["address"], role="policy")
        receipt = await link.send_work(Batch("a", pattern(SIZE)))
        if phase == "in the stream":
            await asyncio.get_running_loop().run_in_executor(None, half_streamed, producer)
        else:
            await consumer.reaches(phase)
        assert producer.bulk_store.statistics()["held_by"] == {str(link.peer): SIZE}
        consumer.kill()
        if phase == "with a view":
            await until(lambda: link.lost, "the loss by silence")
        else:
            producer.forget("policy-0", consumer.facts["incarnation"], "killed by SIGKILL")
        if phase != "after the handler":
            with pytest.raises(PeerLost):
                await receipt.result(5.0)
        assert producer.bulk_store.statistics()["used_bytes"] == 0
        await producer.bulk_store.put(np.zeros(2 * SIZE, np.uint8), holder="another", deadline_s=5.0)
        await producer.close(drain_s=0.0)

    asyncio.run(main())


def stop_in_the_stream(producer: Bus) -> None:
    """The consumer believes that we are on another host, and gets three chunks."""
    reference, answer, server = producer.bulk_store._reference, producer.bulk.server.answer, producer.bulk.server
    producer.bulk_store._reference = lambda *facts: elsewhere(reference(*facts))
    server.answer = lambda frames: answer(frames) if server.statistics()["chunks"] < 3 else []


def half_streamed(producer: Bus) -> None:
    eventually(lambda: producer.bulk.server.statistics()["chunks"] == 3, "three chunks")


async def until(look: Callable[[], Any], what: str) -> None:
    for _ in range(1000):
        if look():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what} did not happen")


@pytest.mark.parametrize("phase", ["before the put", "in the put", "after the send"])
def test_a_killed_producer_leaves_no_memory_and_what_was_seen_stays(phase: str, popen: Callable[..., Any]) -> None:
    producer = Peer(popen, actor="rollout-0", stop_in=phase)

    async def main() -> None:
        consumer = ours("policy-0")
        await consumer.start()
        link = await consumer.connect(producer.facts["address"], role="rollout")
        call = asyncio.ensure_future(link.call(Ask(SIZE), deadline_s=20.0))
        await producer.reaches(phase)
        if phase == "after the send":
            batch = await call
            producer.kill()
            consumer.forget("rollout-0", producer.facts["incarnation"], "killed by SIGKILL")
            np.testing.assert_array_equal(batch.image, pattern(SIZE))
            del batch
        else:
            producer.kill()
            consumer.forget("rollout-0", producer.facts["incarnation"], "killed by SIGKILL")
            with pytest.raises(PeerLost):
                await call
        assert consumer.bulk_reader.statistics()["arenas"] == 0
        await consumer.close(drain_s=0.0)

    asyncio.run(main())


def test_a_producer_killed_in_the_middle_of_a_stream_is_gone_with_the_progress(popen: Callable[..., Any]) -> None:
    producer = Peer(popen, actor="rollout-0")

    async def main() -> None:
        consumer = ours("controller-0", lost_s=0.3, window_chunks=1)
        consumer.resolve_bulk = False
        await consumer.start()
        link = await consumer.connect(producer.facts["address"], role="rollout")
        batch = await link.call(Ask(SIZE), deadline_s=20.0)
        streams = consumer.bulk_reader._streams
        take, taken = streams._take, []
        streams._take = lambda frames, now: (taken.append(1), take(frames, now),
                                             producer.kill() if len(taken) == 3 else None)
        with pytest.raises(BulkGone, match=r"3 of 8 chunks of array 1 of rollout-0/.*is gone"):
            await consumer.bulk_reader.fetch(elsewhere(batch.image), deadline_s=60.0)
        await consumer.close(drain_s=0.0)

    asyncio.run(main())


def test_a_consumer_reads_a_million_bytes_a_hundred_times_and_copies_none(popen: Callable[..., Any]) -> None:
    producer = Peer(popen, actor="rollout-0", budget_bytes=4 * MIB)

    async def main() -> None:
        consumer = ours("policy-0")
        await consumer.start()
        link = await consumer.connect(producer.facts["address"], role="rollout")
        expected = pattern(MIB)
        for _ in range(100):
            batch = await link.call(Ask(MIB), deadline_s=20.0)
            assert np.array_equal(batch.image, expected)
        found = consumer.bulk_reader.statistics()
        assert (found["views"], found["streamed_bytes"]) == (100, 0)
        await consumer.close(drain_s=1.0)

    asyncio.run(main())
