"""What the replay buffer promises."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_actor.actors import replay_buffer
from cosmos_actor.actors.replay_buffer import BufferFull, NotEnoughGroups, ReplayBuffer
from cosmos_actor.actors.trajectory import MalformedGroup, TrajectoryGroup
from cosmos_actor.bus.errors import SchemaMismatch
from cosmos_actor.bus.schema import decode, encode

from .groups import make_group


def a_buffer(*groups: TrajectoryGroup, budget_bytes: int = 1 << 20, max_staleness: int | None = None) -> ReplayBuffer:
    made = ReplayBuffer(budget_bytes=budget_bytes, max_staleness=max_staleness)
    made.put(groups)
    return made


def ids(groups) -> list[str]:
    return [group.group_id for group in groups]


@given(st.permutations(range(6)))
def test_what_is_sampled_does_not_depend_on_the_order_of_arrival(order):
    buffer = a_buffer(*(make_group(number) for number in order))
    assert ids(buffer.sample(4, 0).groups) == ["g000000", "g000001", "g000002", "g000003"]
    assert ids(buffer.sample(2, 0).groups) == ["g000004", "g000005"]
    assert len(buffer) == 0


def test_a_group_comes_out_as_it_went_in():
    group = make_group(5).with_field("rewards", [1, 0, 1], "reward-0")
    out = a_buffer(group).sample(1, 0).groups[0]
    assert all(np.array_equal(value, vars(out)[name]) for name, value in vars(group).items())


def test_the_buffer_owns_its_memory():
    frames = [bytearray(part) for part in encode(make_group(1))[1]]
    received = decode(encode(make_group(1))[0], frames)
    buffer = a_buffer(received)
    for frame in frames:
        frame[:] = bytes(len(frame))
    assert np.array_equal(buffer.sample(1, 0).groups[0].tokens, make_group(1).tokens)


def test_a_group_put_twice_is_counted_as_a_duplicate_also_after_it_left():
    buffer = a_buffer(make_group(0))
    assert buffer.put([make_group(0), make_group(1), make_group(1)]).duplicates == (("g000000", 0), ("g000001", 0))
    buffer.sample(2, 0)
    assert buffer.put([make_group(0)]).accepted == ()
    assert len(buffer) == 0 and buffer.statistics()["duplicates"] == 3


def test_another_attempt_is_another_group():
    buffer = a_buffer(make_group(0), make_group(0, attempt=1))
    assert [group.attempt for group in buffer.sample(2, 0).groups] == [0, 1]


def test_groups_that_left_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(replay_buffer, "REMEMBERED_GROUPS", 2)
    buffer = a_buffer(*(make_group(number) for number in range(3)))
    assert buffer.put([make_group(0)]).duplicates, "what is here is never forgotten"
    buffer.sample(3, 0)
    buffer.put([make_group(3)])
    assert buffer.put([make_group(2)]).duplicates and buffer.put([make_group(0)]).accepted


def test_stale_groups_are_dropped_with_a_reason_and_their_ledger_rows():
    buffer = a_buffer(*(make_group(version, version=version) for version in range(4)), max_staleness=1)
    sample = buffer.sample(2, version=3)
    assert ids(sample.groups) == ["g000002", "g000003"]
    assert [dropped.group_id for dropped in sample.dropped] == ["g000000", "g000001"]
    assert sample.dropped[0].keys == tuple((f"g000000/{index}", 0) for index in range(3))
    assert {dropped.reason for dropped in sample.dropped} == {"stale: more than 1 versions old"}
    assert buffer.statistics()["dropped"] == {"stale: more than 1 versions old": 6}


def test_one_old_token_makes_a_group_stale():
    versions = np.array([1, 2, 2, 2, 2, 2], np.int32)
    buffer = a_buffer(make_group(0, version=2, versions=versions), max_staleness=1)
    with pytest.raises(NotEnoughGroups):
        buffer.sample(1, version=3)


def test_too_few_groups_stay_in_place_and_the_dropped_are_named():
    buffer = a_buffer(make_group(0, version=0), make_group(1, version=5), max_staleness=1)
    with pytest.raises(NotEnoughGroups, match="2 groups were asked for at version 5, .* has 1") as raised:
        buffer.sample(2, version=5)
    assert [dropped.group_id for dropped in raised.value.dropped] == ["g000000"]
    assert ids(buffer.sample(1, version=5).groups) == ["g000001"]


def test_a_put_over_the_budget_takes_nothing_and_names_the_setting():
    size = make_group(0).nbytes
    buffer = a_buffer(make_group(0), budget_bytes=2 * size)
    with pytest.raises(BufferFull, match="replay_buffer.budget_bytes"):
        buffer.put([make_group(1), make_group(2)])
    assert len(buffer) == 1 and buffer.statistics()["bytes"] == size
    assert buffer.put([make_group(1)]).accepted
    buffer.sample(2, 0)
    assert buffer.statistics()["bytes"] == 0


def test_a_malformed_or_empty_group_is_refused_and_nothing_is_taken():
    broken = make_group(1, texts=["only one"])
    for group in (broken, make_group(1, ())):
        buffer = a_buffer()
        with pytest.raises(MalformedGroup, match="g000001"):
            buffer.put([make_group(0), group])
        assert len(buffer) == 0 and buffer.put([make_group(0)]).accepted


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=12), st.integers(0, 4))
def test_a_restored_buffer_answers_as_the_saved_one(puts, taken):
    saved = ReplayBuffer(budget_bytes=1 << 20)
    for number, version in puts:
        saved.put([make_group(number, version=version).with_field("rewards", [1, 2, 3], "reward-0")])
    if taken <= len(saved):
        saved.sample(taken, version=3)
    restored = a_buffer(make_group(77))
    restored.load_state(on_disk_and_back(saved.state()))
    assert restored.statistics() == saved.statistics() and restored.keys() == saved.keys()
    again = [make_group(number) for number in range(10)]
    assert restored.put(again) == saved.put(again)
    left, right = (buffer.sample(len(buffer), 0).groups for buffer in (saved, restored))
    for a, b in zip(left, right, strict=True):
        assert all(np.array_equal(value, vars(b)[name]) for name, value in vars(a).items())


def on_disk_and_back(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return dict(np.load(file, allow_pickle=False))


def test_a_state_of_other_fields_is_refused():
    state = a_buffer(make_group(0)).state()
    damaged = bytearray(state["groups"].tobytes())
    damaged[damaged.index(b"group_batch") + len(b"group_batch")] ^= 0x7
    with pytest.raises(SchemaMismatch):
        a_buffer().load_state({**state, "groups": np.frombuffer(bytes(damaged), np.uint8)})


def test_statistics_name_what_is_there():
    statistics = a_buffer(make_group(0, version=2), make_group(1, version=3)).statistics()
    assert statistics == {
        "groups": 2, "trajectories": 6, "tokens": 12, "bytes": statistics["bytes"], "budget_bytes": 1 << 20,
        "oldest_version": 2, "accepted": 2, "sampled": 0, "duplicates": 0, "dropped": {},
    }
