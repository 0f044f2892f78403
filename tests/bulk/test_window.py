"""The credit window: bounded, complete whatever is lost, and quiet once all is there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_actor.bus.bulk.window import ChunkWindow


def window(chunks: int = 5, credit: int = 2) -> ChunkWindow:
    return ChunkWindow(chunks * 10 - 3, 10, credit=credit, overdue_s=1.0)


def test_only_credit_many_chunks_are_on_their_way_and_each_arrival_asks_for_one_more() -> None:
    stream = window()
    assert stream.ask(0.0) == [0, 1]
    assert stream.ask(0.0) == []
    stream.arrived(1, 0.1)
    assert stream.ask(0.1) == [2]


def test_the_last_chunk_is_what_is_left() -> None:
    assert window().place(4) == (40, 7)
    assert ChunkWindow(0, 10, credit=1, overdue_s=1.0).complete


def test_a_lost_chunk_is_asked_for_again_and_first() -> None:
    stream = window()
    stream.ask(0.0)
    assert stream.next_overdue() == 1.0
    assert stream.ask(1.0) == [0, 1]
    assert stream.next_overdue() == 3.0, "twice as patient after each loss"
    assert stream.statistics()["asked_again"] == 2


def test_what_was_on_its_way_over_a_broken_connection_is_wanted_again_at_once() -> None:
    stream = window()
    stream.ask(0.0)
    stream.connection_broke()
    assert stream.ask(0.1) == [0, 1]


def test_a_slow_peer_that_still_delivers_is_not_asked_twice() -> None:
    stream = window()
    stream.ask(0.0)
    stream.arrived(0, 0.9)
    assert stream.ask(1.5) == [2]
    assert stream.statistics()["asked_again"] == 0


def test_a_damaged_chunk_is_counted_and_wanted_again() -> None:
    stream = window()
    stream.ask(0.0)
    assert stream.damaged(1) == 1
    assert stream.ask(0.0) == [1]
    assert stream.damaged(1) == 2


def test_a_late_copy_of_a_kept_chunk_is_not_expected_and_changes_nothing() -> None:
    stream = window()
    stream.ask(0.0)
    stream.arrived(0, 0.1)
    assert not stream.expects(0)
    stream.arrived(0, 0.2)
    assert stream.kept == 1 and stream.damaged(0) == 0


@pytest.mark.parametrize("chunk, credit", [(0, 1), (1, 0)])
def test_a_window_that_moves_nothing_is_refused(chunk: int, credit: int) -> None:
    with pytest.raises(ValueError, match="move nothing"):
        ChunkWindow(1, chunk, credit=credit, overdue_s=1.0)


FATES = st.lists(st.sampled_from(["arrives", "lost", "damaged", "twice", "late"]), max_size=80)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 12), st.integers(1, 4), FATES)
def test_every_chunk_is_kept_exactly_once_whatever_happens(chunks: int, credit: int, fates: list[str]) -> None:
    stream = ChunkWindow(chunks * 10, 10, credit=credit, overdue_s=1.0)
    now, kept, fate = 0.0, [], iter(fates)
    for _ in range(len(fates) + chunks + 2):
        for chunk in stream.ask(now):
            what = next(fate, "arrives")
            if what == "damaged":
                stream.damaged(chunk)
            elif what != "lost":
                kept += [chunk] if stream.expects(chunk) else []
                stream.arrived(chunk, now)
            if what == "twice":
                stream.arrived(chunk, now)
            assert stream.statistics()["on_their_way"] <= credit
        now = max(now, stream.next_overdue() or 0.0)
    assert stream.complete and sorted(kept) == list(range(chunks))
