"""What a group of trajectories promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.actors.experience import GroupBatch, in_order, owned
from cosmos_actor.actors.trajectory import (
    FieldAlreadyWritten,
    GenerateTask,
    MalformedGroup,
)
from cosmos_actor.bus.errors import SchemaMismatch
from cosmos_actor.bus.schema import decode, encode
from cosmos_actor.roles.messages import Tasks

from .groups import make_group


def same(left, right) -> bool:
    fields = vars(left)
    return all(np.array_equal(value, vars(right)[name]) for name, value in fields.items())


def test_a_group_arrives_as_it_was_sent():
    group = make_group(3).with_field("rewards", [1.0, 0.0, 0.5], "reward-0")
    arrived = decode(*encode(GroupBatch([group]))).groups[0]
    assert same(group, arrived)
    assert arrived.reference_logprobs is None and arrived.written_by == {"rewards": "reward-0"}


def test_groups_of_different_sizes_travel_in_one_message():
    groups = [make_group(0, (1, 2)), make_group(1, (4, 4, 4)), make_group(2, ())]
    arrived = decode(*encode(GroupBatch(groups))).groups
    assert all(same(a, b) for a, b in zip(groups, arrived, strict=True))


def test_tasks_of_different_prompts_travel_in_one_message():
    tasks = [GenerateTask(f"g{n:06d}", 0, {"a": n}, np.arange(n, dtype=np.int32), 4, 7 + n) for n in (1, 5)]
    arrived = decode(*encode(Tasks(tasks)))
    assert [task.prompt.tolist() for task in arrived.tasks] == [[0], [0, 1, 2, 3, 4]]
    assert arrived.tasks[1].keys == [(f"g000005/{i}", 0) for i in range(4)]


def test_the_sender_refuses_a_wrong_dtype_and_columns_that_disagree():
    with pytest.raises(SchemaMismatch, match="logprobs"):
        encode(make_group(logprobs=np.zeros(6, np.float64)))
    with pytest.raises(SchemaMismatch, match="finished"):
        encode(make_group(finished=np.ones(2, np.uint8)))


def test_check_refuses_lengths_that_do_not_add_up():
    make_group().check()
    with pytest.raises(MalformedGroup, match=r"`tokens` is \[7\], not \[6\]"):
        make_group().__class__(**{**vars(make_group()), "lengths": np.array([2, 3, 2], np.int32)}).check()
    with pytest.raises(MalformedGroup, match="2 texts for 3 samples"):
        make_group(texts=["a", "b"]).check()
    with pytest.raises(MalformedGroup, match="negative"):
        make_group(lengths=(2, -1, 5)).check()


def test_split_gives_each_sample_its_own_tokens():
    group = make_group(lengths=(2, 0, 3), tokens=np.arange(5, dtype=np.int32))
    assert [part.tolist() for part in group.split("tokens")] == [[0, 1], [], [2, 3, 4]]
    assert group.token_count == 5 and group.samples == 3


def test_a_field_has_one_writer():
    scored = make_group().with_field("rewards", np.ones(3), "reward-0")
    with pytest.raises(FieldAlreadyWritten, match="reward-1 may not write `rewards`, reward-0 wrote it"):
        scored.with_field("rewards", np.zeros(3), "reward-1")
    with pytest.raises(FieldAlreadyWritten):
        make_group(values=np.zeros(6, np.float32)).with_field("values", np.zeros(6), "critic-0")


def test_only_appendable_fields_of_the_right_shape_are_added():
    with pytest.raises(MalformedGroup, match="`tokens` is no field that a role adds"):
        make_group().with_field("tokens", np.zeros(6), "reward-0")
    with pytest.raises(MalformedGroup, match=r"`rewards` is \[3\], not \[6\]"):
        make_group().with_field("rewards", np.zeros(6), "reward-0")


def test_staleness_counts_from_the_oldest_weights_involved():
    assert make_group(version=4).staleness(6) == 2
    behind = make_group(version=4, versions=np.array([3, 4, 4, 5, 5, 5], np.int32))
    assert behind.staleness(6) == 3
    assert (behind.version_min, behind.version_max) == (3, 5)
    assert make_group(lengths=(), version=4).staleness(6) == 2


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8))
def test_select_keeps_ids_and_tokens_of_the_kept(samples):
    lengths = tuple(length for length, _ in samples)
    mask = np.array([kept for _, kept in samples], bool)
    group = make_group(1, lengths).with_field("rewards", np.arange(len(lengths)), "reward-0")
    chosen = group.select(mask)
    chosen.check()
    kept = np.flatnonzero(mask)
    assert chosen.trajectory_ids == tuple(f"g000001/{i}" for i in kept)
    assert chosen.rewards.tolist() == kept.tolist()
    assert chosen.texts == [group.texts[i] for i in kept]
    for name in ("tokens", "logprobs", "versions"):
        assert all(np.array_equal(a, group.split(name)[i]) for a, i in zip(chosen.split(name), kept, strict=True))
    assert chosen.select(np.ones(len(kept), bool)).trajectory_ids == chosen.trajectory_ids


def test_select_recomputes_the_versions_and_refuses_a_wrong_mask():
    group = make_group(lengths=(1, 1), versions=np.array([1, 2], np.int32), version=1)
    assert group.select(np.array([False, True])).version_min == 2
    for mask in ([True], [1, 0]):
        with pytest.raises(MalformedGroup, match="mask"):
            group.select(mask)


def test_owned_copies_what_is_borrowed_and_nothing_else():
    mine = make_group(1)
    assert owned(mine) is mine
    head, frames = encode(mine)
    frames = [bytearray(frame) for frame in frames]
    kept = owned(decode(head, frames))
    for frame in frames:
        frame[:] = bytes(len(frame))
    assert same(kept, mine)


def test_order_is_by_number_whatever_the_width_of_the_id():
    groups = [make_group(number) for number in (1_000_000, 2, 999_999)]
    assert [group.group_id for group in in_order(groups)] == ["g000002", "g999999", "g1000000"]
