"""The store: the budget, the queue of puts, and what ends a lease."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import numpy as np
import pytest

from cosmos_actor.bus.bulk.ref import storage_dtype
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.errors import BulkCorrupt, BulkError, BulkFull, BulkGone, DeadlineExceeded
from tests.bulk.tools import identity, store

ONE = np.zeros(MIB, np.uint8)
TWO = np.zeros(2 * MIB, np.uint8)
THREE = np.zeros(3 * MIB, np.uint8)


def content(of: BulkStore, generation: int) -> bytes | None:
    with of.reading(generation) as found:
        return None if found is None else found.tobytes()


@pytest.mark.parametrize("array", [
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.arange(12, dtype=np.int64)[::3],
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.zeros((0, 3), np.float16),
    np.array(7, np.uint8),
], ids=["plain", "strided", "big-endian", "fortran", "empty", "scalar"])
def test_what_is_put_is_what_lies_in_the_arena_in_native_c_order(array: np.ndarray) -> None:
    with store() as made:
        ref = made.try_put(array, holder="a")
        bits = np.frombuffer(content(made, ref.generation) or b"", storage_dtype(ref)).reshape(ref.shape)
        np.testing.assert_array_equal(bits, array)


def test_bfloat16_travels_as_its_bits() -> None:
    with store() as made:
        ref = made.try_put(np.arange(4, dtype=np.uint16), holder="a", dtype="bfloat16")
        assert ref.dtype == "bfloat16" and storage_dtype(ref) == np.uint16
        with pytest.raises(BulkError, match="float32 cannot travel as bfloat16"):
            made.try_put(np.zeros(4, np.float32), holder="a", dtype="bfloat16")
        with pytest.raises(BulkError, match="object"):
            made.try_put(np.array([{}]), holder="a")


def test_a_put_over_the_budget_is_refused_by_the_name_of_the_setting_and_of_who_fills_it() -> None:
    with store(4 * MIB) as made:
        made.try_put(THREE, holder="slow-1")
        with pytest.raises(BulkFull, match=r"3145728 of 4194304 bytes are in use, most by slow-1.*`bulk.budget_bytes`"):
            made.try_put(TWO, holder="b")


def test_a_put_waits_for_a_release_and_gets_in() -> None:
    async def main() -> None:
        with store(4 * MIB) as made:
            first = made.try_put(THREE, holder="a")
            waiting = asyncio.ensure_future(made.put(TWO, holder="b", deadline_s=20.0))
            while not made.statistics()["waiting_puts"]:
                await asyncio.sleep(0)
            assert not waiting.done()
            threading.Thread(target=made.release, args=(first, "a")).start()
            second = await waiting
            assert made.statistics()["held_by"] == {"b": second.nbytes}

    asyncio.run(main())


def test_a_put_that_gets_no_room_in_time_names_the_setting_and_leaves_the_queue() -> None:
    async def main() -> None:
        with store(4 * MIB) as made:
            made.try_put(THREE, holder="slow-1")
            with pytest.raises(DeadlineExceeded, match="most by slow-1.*setting `bulk.budget_bytes`"):
                await made.put(TWO, holder="b", deadline_s=0.01)
            assert made.statistics()["waiting_puts"] == 0
            made.try_put(ONE, holder="b")

    asyncio.run(main())


def test_what_can_never_fit_does_not_wait() -> None:
    async def main() -> None:
        with store(MIB) as made, pytest.raises(BulkFull, match="more than the whole store"):
            await made.put(TWO, holder="b", deadline_s=60.0)

    asyncio.run(main())


def test_no_later_put_passes_one_that_waits() -> None:
    async def main() -> None:
        with store(4 * MIB) as made:
            first = made.try_put(THREE, holder="a")
            large = asyncio.ensure_future(made.put(TWO, holder="b", deadline_s=20.0))
            small = asyncio.ensure_future(made.put(ONE, holder="c", deadline_s=20.0))
            while made.statistics()["waiting_puts"] < 2:
                await asyncio.sleep(0)
            with pytest.raises(BulkFull, match="2 puts wait"):
                made.try_put(ONE, holder="d")
            made.release(first, "a")
            assert (await large).generation < (await small).generation

    asyncio.run(main())


def test_a_cancelled_wait_gives_its_turn_and_its_room_away() -> None:
    async def main() -> None:
        with store(4 * MIB) as made:
            first = made.try_put(THREE, holder="a")
            large = asyncio.ensure_future(made.put(THREE, holder="b", deadline_s=20.0))
            small = asyncio.ensure_future(made.put(ONE, holder="c", deadline_s=20.0))
            while made.statistics()["waiting_puts"] < 2:
                await asyncio.sleep(0)
            large.cancel()
            await small
            granted = asyncio.ensure_future(made.put(ONE, holder="d", deadline_s=20.0))
            while not made.statistics()["waiting_puts"]:
                await asyncio.sleep(0)
            made.release(first, "a")
            granted.cancel()
            await asyncio.gather(granted, return_exceptions=True)
            assert set(made.statistics()["held_by"]) == {"c"}

    asyncio.run(main())


def test_a_put_cancelled_while_it_copies_leaves_nothing() -> None:
    async def main() -> None:
        with store(32 * MIB) as made:
            copying = asyncio.ensure_future(made.put(np.zeros(16 * MIB, np.uint8), holder="a", deadline_s=20.0))
            while not made.statistics()["puts"]:
                await asyncio.sleep(0)
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
            while made.statistics()["leases"]:
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_the_budget_is_regained_when_a_holder_is_gone() -> None:
    with store() as made:
        shared = made.try_put(ONE, holder="a")
        made.add_holder(shared, "b")
        made.try_put(ONE, holder="a")
        assert made.drop_holder("a") == 1
        assert made.statistics()["held_by"] == {"b": MIB}
        assert made.drop_holder("b") == 1
        assert made.statistics()["used_bytes"] == 0


def test_an_ended_array_is_gone_for_a_new_holder_and_for_the_server() -> None:
    with store() as made, store() as other:
        ref = made.try_put(ONE, holder="a")
        assert made.release(ref, "a")
        assert not made.release(ref, "a")
        assert content(made, ref.generation) is None
        with pytest.raises(BulkGone, match="ended before c asked"):
            made.add_holder(ref, "c")
        assert other.try_put(ONE, holder="a").generation == ref.generation
        assert not other.release(ref, "a")


def test_a_block_is_not_used_again_while_a_stream_reads_it() -> None:
    with store() as made:
        ref = made.try_put(ONE, holder="a")
        with made.reading(ref.generation):
            made.release(ref, "a")
            assert made.statistics()["used_bytes"] == MIB
        assert made.statistics()["used_bytes"] == 0


def test_a_closed_store_says_so_and_ends_the_waits() -> None:
    async def main() -> None:
        made = BulkStore(identity(), BulkSettings(budget_bytes=MIB))
        made.try_put(ONE, holder="a")
        waiting = asyncio.ensure_future(made.put(ONE, holder="b", deadline_s=20.0))
        while not made.statistics()["waiting_puts"]:
            await asyncio.sleep(0)
        made.close()
        made.close()
        with pytest.raises(BulkGone, match="store is closed"):
            await waiting
        with pytest.raises(BulkGone, match="store is closed"):
            made.try_put(ONE, holder="a")

    asyncio.run(main())


def test_puts_and_releases_from_many_threads_keep_every_array_whole() -> None:
    with store(8 * MIB) as made:
        wrong: list[int] = []

        def work(number: int) -> None:
            for size in range(1, 200):
                ref = made.try_put(np.full(size * 97, number, np.uint8), holder=str(number))
                if content(made, ref.generation) != bytes([number]) * (size * 97):
                    wrong.append(size)
                made.release(ref, str(number))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert not wrong
        assert made.statistics()["used_bytes"] == 0 and made.statistics()["granted"] == 6 * 199


def test_a_reference_does_not_print_its_secret_and_is_checked_before_use() -> None:
    from dataclasses import replace

    with store() as made:
        ref = made.try_put(ONE, holder="a")
        assert repr(ref.token) not in repr(ref) and ref.token.hex() not in f"{ref}"
        for lie in ({"shape": (5,)}, {"dtype": "object"}, {"offset": 1 << 40}, {"shape": (-1, -MIB)}, {"nbytes": -1}):
            with pytest.raises(BulkCorrupt, match="array 1 of rollout-0"):
                storage_dtype(replace(ref, **lie))


def test_settings_that_cannot_work_are_refused_by_name() -> None:
    for name, value in (("chunk_bytes", 1), ("budget_bytes", 0), ("prefault_bytes", 1 << 60)):
        with pytest.raises(BulkError, match=f"bulk.{name}"):
            BulkSettings(**{name: value})


@pytest.mark.parametrize(("limit", "letter"), [("RLIMIT_FSIZE", "f"), ("RLIMIT_AS", "v")])
def test_a_limit_of_the_process_that_leaves_too_little_shared_memory_is_one_line_with_the_setting(
        limit: str, letter: str) -> None:
    """In a process of its own, whose limit can not be raised again."""
    program = (
        "import resource, sys\n"
        "from cosmos_actor.bus.bulk.store import BulkStore\n"
        "from cosmos_actor.bus.bulk.settings import BulkSettings\n"
        "from cosmos_actor.bus.errors import NoSharedMemory\n"
        "from tests.bulk.tools import identity\n"
        f"resource.setrlimit(resource.{limit}, (2 << 30, 2 << 30))\n"
        "try:\n"
        "    BulkStore(identity('policy-0'), BulkSettings(budget_bytes=4 << 30))\n"
        "except NoSharedMemory as error:\n"
        "    print(error)\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("\n") == 1 and "bytes of shared memory are to be had" in done.stdout
    assert f"(`ulimit -{letter}`) or lower bulk.budget_bytes (setting `bulk.budget_bytes`)" in done.stdout
