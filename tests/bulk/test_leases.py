"""The lease table: an array lives exactly as long as it has a holder."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_actor.bus.bulk.leases import LeaseTable

HOLDERS = ("a", "b", "c")


def test_the_last_of_two_holders_ends_the_lease() -> None:
    table = LeaseTable()
    lease = table.grant(0, 10, "a")
    assert table.hold(lease.generation, "b")
    assert table.let_go(lease.generation, "a") is None
    assert table.let_go(lease.generation, "b") is lease
    assert table.find(lease.generation) is None


def test_one_holder_may_hold_twice_and_drop_ends_both() -> None:
    table = LeaseTable()
    lease = table.grant(0, 10, "a")
    table.hold(lease.generation, "a")
    assert table.let_go(lease.generation, "a") is None
    table.hold(lease.generation, "a")
    assert table.drop("a") == [lease]


def test_a_release_of_what_is_not_held_is_counted_and_changes_nothing() -> None:
    table = LeaseTable()
    lease = table.grant(0, 10, "a")
    assert table.let_go(lease.generation, "b") is None
    assert table.let_go(99, "a") is None
    assert table.statistics()["stale_releases"] == 2
    assert table.holders() == {"a": 10}


def test_a_dead_lease_cannot_be_held_again() -> None:
    table = LeaseTable()
    lease = table.grant(0, 10, "a")
    table.let_go(lease.generation, "a")
    assert not table.hold(lease.generation, "b")
    assert table.grant(0, 10, "a").generation != lease.generation


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["grant", "hold", "let_go", "drop"]), st.sampled_from(HOLDERS),
                          st.integers(1, 8)), max_size=50))
def test_a_lease_lives_if_and_only_if_a_count_of_its_holds_says_so(steps: list[tuple[str, str, int]]) -> None:
    table, model = LeaseTable(), {}  # model: (generation, holder) -> holds
    ended: list[int] = []
    for what, holder, generation in steps:
        if what == "grant":
            model[table.grant(0, 1, holder).generation, holder] = 1
        elif what == "hold" and table.hold(generation, holder):
            model[generation, holder] = model.get((generation, holder), 0) + 1
        elif what == "let_go":
            lease = table.let_go(generation, holder)
            ended += [lease.generation] if lease else []
            if model.get((generation, holder), 0) > 0:
                model[generation, holder] -= 1
        elif what == "drop":
            ended += [lease.generation for lease in table.drop(holder)]
            model = {key: 0 if key[1] == holder else count for key, count in model.items()}
        living = {generation for (generation, _), count in model.items() if count}
        assert {g for g in range(1, 60) if table.find(g)} == living
        assert table.statistics()["holds"] == sum(model.values())
    assert len(ended) == len(set(ended))
