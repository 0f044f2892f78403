"""The free list: no overlap, neighbours join, the capacity is never passed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_actor.bus.bulk.allocator import PAGE_BYTES, FreeList, block_bytes

PAGES = 32
FIRST = 3 * PAGE_BYTES


class Model:
    """What the free list says it handed out, checked from outside after every step."""

    def __init__(self) -> None:
        self.free_list = FreeList(PAGES * PAGE_BYTES, first_byte=FIRST)
        self.living: dict[int, int] = {}

    def allocate(self, nbytes: int) -> None:
        start = self.free_list.allocate(nbytes)
        if start is None:
            assert self.longest_gap() < block_bytes(nbytes)
        else:
            self.living[start] = nbytes
        self.check()

    def free(self, choice: int) -> None:
        if self.living:
            start = sorted(self.living)[choice % len(self.living)]
            assert self.free_list.free(start) == block_bytes(self.living.pop(start))
        self.check()

    def longest_gap(self) -> int:
        return max((end - start for start, end in self.gaps()), default=0)

    def gaps(self) -> list[tuple[int, int]]:
        found, end = [], FIRST
        for start, nbytes in [*sorted(self.living.items()), (FIRST + PAGES * PAGE_BYTES, 0)]:
            if start > end:
                found.append((end, start))
            end = start + block_bytes(nbytes)
        return found

    def check(self) -> None:
        seen = FIRST
        for start in sorted(self.living):
            assert start >= seen and start % PAGE_BYTES == 0
            seen = start + self.living[start]
        assert seen <= FIRST + PAGES * PAGE_BYTES
        found = self.free_list.statistics()
        assert found["used_bytes"] == sum(map(block_bytes, self.living.values())) <= found["capacity_bytes"]
        assert found["holes"] == len(self.gaps())
        assert found["largest_hole_bytes"] == self.longest_gap()


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 9 * PAGE_BYTES)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_blocks_never_overlap_and_holes_are_joined(steps: list[tuple[bool, int]]) -> None:
    model = Model()
    for allocate, number in steps:
        if allocate:
            model.allocate(number)
        else:
            model.free(number)


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_freeing_everything_leaves_one_hole_of_the_whole_capacity(steps: list[tuple[bool, int]]) -> None:
    model = Model()
    for _, number in steps:
        model.allocate(number)
    while model.living:
        model.free(7)
    assert model.free_list.allocate(PAGES * PAGE_BYTES) == FIRST


def test_the_lowest_hole_is_used_first_so_that_touched_memory_is_used_again() -> None:
    free_list = FreeList(PAGES * PAGE_BYTES)
    starts = [free_list.allocate(PAGE_BYTES) for _ in range(4)]
    free_list.free(PAGE_BYTES)
    assert starts == [0, PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES]
    assert free_list.allocate(1) == PAGE_BYTES
    assert free_list.statistics()["high_water_byte"] == 4 * PAGE_BYTES


def test_a_block_is_freed_once() -> None:
    free_list = FreeList(PAGE_BYTES)
    free_list.free(free_list.allocate(0) or 0)
    with pytest.raises(KeyError):
        free_list.free(0)


@pytest.mark.parametrize("capacity, first", [(0, 0), (PAGE_BYTES + 1, 0), (PAGE_BYTES, 8)])
def test_an_arena_is_whole_pages(capacity: int, first: int) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        FreeList(capacity, first_byte=first)
