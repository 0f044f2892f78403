"""The reader on the producer's host: it copies nothing, it cannot write, and it never shows other bytes silently."""

from __future__ import annotations

import asyncio
import gc
import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cosmos_actor.bus.bulk.arena import Arena, ArenaRefused, ArenaView
from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.errors import BulkCorrupt, BulkGone
from tests.bulk.tools import elsewhere, pattern, store


def fetch(there: BulkReader, ref: BulkRef, **options: object) -> np.ndarray:
    return asyncio.run(there.fetch(ref, deadline_s=5.0, **options))


def test_a_view_lies_in_a_read_only_mapping_of_the_producers_memory() -> None:
    with store() as made:
        there = BulkReader()
        ref = made.try_put(pattern(MIB).view(np.float32).reshape(64, -1), holder="a")
        found = fetch(there, ref)
        address = found.__array_interface__["data"][0]
        line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if lies_in(address, line))
        assert " r--s " in line and "memfd:cosmos-actor-bulk" in line
        with made.reading(ref.generation) as own:
            own[0] += 1
            assert found.view(np.uint8).reshape(-1)[0] == own[0], "the same memory, not a copy of it"
        with pytest.raises(ValueError, match="read-only"):
            found[0, 0] = 1.0
        with pytest.raises(ValueError, match="WRITEABLE"):
            found.flags.writeable = True
        there.close()


def lies_in(address: int, line: str) -> bool:
    start, end = (int(text, 16) for text in line.split()[0].split("-"))
    return start <= address < end


def test_one_mapping_serves_all_arrays_of_a_peer() -> None:
    with store() as made:
        there = BulkReader()
        for _ in range(5):
            fetch(there, made.try_put(pattern(1000), holder="a"))
        assert there.statistics()["arenas"] == 1 and there.statistics()["views"] == 5
        there.close()


def test_an_ended_lease_is_gone_before_and_after_the_look_also_when_the_block_is_used_again() -> None:
    with store() as made:
        there = BulkReader()
        ref = made.try_put(pattern(MIB), holder="a")
        found = fetch(there, ref)
        there.check(ref)
        made.release(ref, "a")
        for _ in range(3):
            with pytest.raises(BulkGone, match="array 1 of rollout-0.*lease ended while it was used"):
                there.check(ref)
            with pytest.raises(BulkGone, match="lease ended"):
                fetch(there, ref)
            assert made.try_put(pattern(MIB), holder="a").offset >= ref.offset
        del found
        there.close()


def test_a_stale_reference_into_the_middle_of_a_newer_block_is_gone() -> None:
    with store() as made:
        there = BulkReader()
        first, second = made.try_put(pattern(MIB), holder="a"), made.try_put(pattern(MIB), holder="a")
        made.drop_holder("a")
        large = np.full(2 * MIB // 8, second.generation, np.uint64)
        assert made.try_put(large, holder="a").offset == first.offset
        with pytest.raises(BulkGone):
            fetch(there, second)
        there.close()


def test_a_digest_tells_other_bytes() -> None:
    with store() as made:
        there = BulkReader()
        for size in (1000, 2 * MIB):
            ref = made.try_put(pattern(size), holder="a", digest=True)
            fetch(there, ref, verify=True)
            with made.reading(ref.generation) as own:
                own[size // 2] ^= 1
            with pytest.raises(BulkCorrupt, match="another digest than it was put with"):
                fetch(there, ref, verify=True)
        with pytest.raises(BulkCorrupt, match="carries no digest"):
            fetch(there, made.try_put(pattern(9), holder="a"), verify=True)
        there.close()


def test_an_array_larger_than_the_limit_is_refused_before_memory_is_taken() -> None:
    with store() as made:
        there = BulkReader(BulkSettings(max_array_bytes=1000))
        with pytest.raises(BulkCorrupt, match="`bulk.max_array_bytes`"):
            fetch(there, elsewhere(made.try_put(pattern(1001), holder="a")))
        with pytest.raises(BulkCorrupt, match="size does not follow"):
            fetch(there, replace(made.try_put(pattern(10), holder="a"), shape=(1 << 50, 1 << 50)))
        there.close()


def test_on_drop_is_called_when_the_last_view_of_a_view_is_dropped() -> None:
    with store() as made:
        there, dropped = BulkReader(), []
        ref = made.try_put(pattern(MIB), holder="a")
        part = fetch(there, ref, on_drop=lambda: dropped.append(1))[10:20].reshape(2, 5).T
        gc.collect()
        assert not dropped
        del part
        assert dropped == [1]
        there.close()


def test_a_closed_store_is_gone_and_its_memory_goes_with_the_last_view() -> None:
    there = BulkReader()
    with store() as made:
        ref = made.try_put(pattern(MIB), holder="a")
        found = fetch(there, ref)
    with pytest.raises(BulkGone):
        fetch(there, ref)
    np.testing.assert_array_equal(found, pattern(MIB))
    there.forget(ref.owner, ref.incarnation)
    assert there.statistics()["arenas"] == 0 and mapped_arenas() == 1
    del found
    assert mapped_arenas() == 0


def test_the_memory_of_a_dead_producer_is_let_go_when_another_appears() -> None:
    there = BulkReader()
    with store() as old:
        fetch(there, old.try_put(pattern(MIB), holder="a"))
    assert mapped_arenas() == 1
    with store() as new:
        fetch(there, new.try_put(pattern(MIB), holder="a"))
        assert there.statistics()["arenas"] == 1
    there.close()
    assert mapped_arenas() == 0


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:cosmos-actor-bulk")


def test_a_reader_without_streams_says_why_it_cannot_read() -> None:
    with store() as made:
        there = BulkReader()
        ref = made.try_put(pattern(10), holder="a")
        with pytest.raises(BulkGone, match="on its own host only: it is another host"):
            fetch(there, elsewhere(ref))
        with pytest.raises(BulkGone, match="on its own host only: /proc/999999999/fd/1: No such file"):
            fetch(there, replace(ref, pid=999999999, fd=1, arena=bytes(16)))
        assert there.statistics()["refused"]
        there.close()


@pytest.fixture
def arena() -> Arena:
    made = Arena(MIB)
    yield made
    made.close()


def refusal(fd: int, arena: Arena, size: int = 0) -> str:
    with pytest.raises(ArenaRefused) as caught:
        ArenaView(os.getpid(), fd, arena.token, size or arena.size_bytes)
    return str(caught.value)


def test_a_descriptor_that_was_used_again_is_never_taken_for_the_arena(arena: Arena, tmp_path: Path) -> None:
    other = Arena(MIB)
    assert "another arena: the producer is gone" in refusal(other.fd, arena)
    other.close()
    assert "is not an arena" in refusal(arena.fd, arena, size=4096)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        assert "is not an arena" in refusal(fd, arena)
        os.close(fd)


def test_memory_whose_owner_could_shrink_it_is_not_mapped(arena: Arena) -> None:
    """Reading past the end of a shrunk file kills the reader."""
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, arena.size_bytes)
    assert "not sealed" in refusal(fd, arena)
    os.close(fd)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)


def test_nobody_else_can_map_the_arena_for_writing(arena: Arena) -> None:
    import mmap

    fd = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, arena.size_bytes)
    with pytest.raises(PermissionError):
        os.write(fd, b"x")
    os.close(fd)


def test_no_file_names_the_arena_and_memory_is_taken_when_it_is_touched(arena: Arena) -> None:
    assert os.readlink(f"/proc/self/fd/{arena.fd}") == "/memfd:cosmos-actor-bulk (deleted)"
    assert stat.S_ISREG(os.fstat(arena.fd).st_mode)
    untouched = os.fstat(arena.fd).st_blocks * 512
    assert untouched <= 2 * 4096
    arena.fault_in(MIB // 2)
    assert os.fstat(arena.fd).st_blocks * 512 >= MIB // 2
