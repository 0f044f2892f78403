"""The loan table: nobody gives an array back that is still used here or further on, and everybody does in the end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_actor.bus.bulk.loans import LoanTable

KEY = (b"arena", 7)
PEERS = ("owner", "consumer", "other")


def test_what_is_used_here_only_goes_back_with_its_last_use() -> None:
    loans = LoanTable()
    loans.borrow(KEY, "owner")
    loans.borrow(KEY, "owner")
    assert loans.use_ended(KEY) == []
    assert loans.use_ended(KEY) == [("owner", KEY, 2)]
    assert loans.use_ended(KEY) == [] and loans.statistics()["loans"] == 0


def test_what_was_passed_on_goes_back_after_the_consumer_gave_it_back() -> None:
    loans = LoanTable()
    loans.borrow(KEY, "owner")
    assert loans.lend(KEY, "consumer")
    assert loans.use_ended(KEY) == []
    assert loans.given_back(KEY, "other") == []
    assert loans.given_back(KEY, "consumer") == [("owner", KEY, 1)]
    assert not loans.lend(KEY, "consumer")


def test_a_lost_consumer_gives_everything_back() -> None:
    loans = LoanTable()
    loans.borrow(KEY, "owner")
    loans.lend(KEY, "consumer")
    loans.lend(KEY, "consumer")
    loans.use_ended(KEY)
    assert loans.peer_lost("consumer") == ([("owner", KEY, 1)], 0)


def test_a_lost_lender_is_owed_nothing_and_leaves_an_orphan_that_is_counted() -> None:
    loans = LoanTable()
    loans.borrow(KEY, "owner")
    assert loans.peer_lost("owner") == ([], 1)
    assert loans.statistics()["orphaned"] == 1
    assert loans.use_ended(KEY) == [] and loans.statistics()["loans"] == 0


EVENTS = st.sampled_from(["borrow", "lend", "end", "back", "lost"])
STEPS = st.lists(st.tuples(EVENTS, st.sampled_from(PEERS)), max_size=40)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_returns_equal_loans_and_come_only_when_nothing_is_used_or_lent(steps: list[tuple[str, str]]) -> None:
    loans, used, owed, lent = LoanTable(), 0, dict.fromkeys(PEERS, 0), dict.fromkeys(PEERS, 0)
    for what, peer in steps:
        known = used > 0 or any(lent.values())
        returns = []
        if what == "borrow":
            loans.borrow(KEY, peer)
            used, owed[peer] = used + 1, owed[peer] + 1
        elif what == "lend":
            assert loans.lend(KEY, peer) == known
            lent[peer] += known
        elif what == "end" and used:
            used -= 1
            returns = loans.use_ended(KEY)
        elif what == "back":
            lent[peer] -= lent[peer] > 0
            returns = loans.given_back(KEY, peer)
        elif what == "lost":
            owed[peer] = lent[peer] = 0
            returns, _ = loans.peer_lost(peer)
        if used or any(lent.values()):
            assert returns == []
        elif known:
            assert {lender: count for lender, _, count in returns} == {p: n for p, n in owed.items() if n}
            owed = dict.fromkeys(PEERS, 0)
        assert loans.statistics()["loans"] == (1 if used or any(lent.values()) else 0)
