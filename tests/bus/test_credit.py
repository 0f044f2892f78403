from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.bus.credit import Credit


@given(st.integers(1, 10), st.integers(1, 1000), st.lists(st.tuples(st.booleans(), st.integers(1, 400)), max_size=100))
def test_never_more_than_granted_is_taken(messages: int, nbytes: int, steps: list[tuple[bool, int]]) -> None:
    credit, taken = Credit(messages, nbytes), []
    for take, size in steps:
        if take:
            fits = len(taken) < messages and sum(taken) + size <= nbytes
            assert credit.take(size) == fits
            taken += [size] if fits else []
        elif taken:
            credit.give_back(taken.pop())
        assert credit.used_messages == len(taken) <= messages
        assert credit.used_bytes == sum(taken) <= nbytes


def test_credit_given_back_twice_is_a_bug_that_shows() -> None:
    credit = Credit(1, 10)
    assert credit.take(10)
    credit.give_back(10)
    with pytest.raises(AssertionError, match="twice"):
        credit.give_back(10)


def test_a_smaller_grant_lets_nothing_out_until_enough_came_back() -> None:
    credit = Credit(2, 100)
    assert credit.take(1) and credit.take(1)
    credit.grant(1, 100)
    credit.give_back(1)
    assert not credit.take(1)
    credit.give_back(1)
    assert credit.take(1)
    assert credit.statistics()["refusals"] == 1
