"""Leases: each unit counts once, an error is never a result, and a group is done or dropped whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cosmos_actor.simulator_bridge.contract import WorkUnit
from cosmos_actor.simulator_bridge.leases import Lease, LeaseTable, UnknownUnit

ATTEMPTS = 3


def unit(name: str) -> WorkUnit:
    return WorkUnit(name, "reach", seed=1)


def table(*names: str, **groups: str) -> LeaseTable:
    made = LeaseTable(attempts=ATTEMPTS, lease_s=10.0)
    for name in names:
        made.add(unit(name), group=groups.get(name, ""))
    return made


def take(leases: LeaseTable, holder: str = "sim-0", now: float = 0.0) -> Lease:
    lease = leases.take(holder, now)
    assert lease is not None
    return lease


def test_a_unit_is_with_one_holder_and_done_once() -> None:
    leases = table("a")
    lease = take(leases)
    assert leases.take("sim-1", 0.0) is None
    assert leases.done(lease)
    assert not leases.done(lease) and not leases.renew(lease, 1.0)
    assert leases.statistics()["done"] == 1


def test_a_failure_is_tried_again_first_and_given_up_at_the_limit() -> None:
    leases = table("a", "b")
    attempts = []
    for _ in range(ATTEMPTS):
        lease = take(leases)
        attempts.append((lease.unit.unit_id, lease.unit.attempt))
        verdict = leases.failed(lease, "step")
    assert attempts == [("a", 0), ("a", 1), ("a", 2)]
    assert verdict == (False, ["a"])
    assert take(leases).unit.unit_id == "b"
    assert leases.statistics()["failures"] == {"step": ATTEMPTS}


def test_what_an_old_lease_brings_does_not_count() -> None:
    leases = table("a")
    old = take(leases)
    assert leases.failed(old, "lost").again
    new = take(leases, "sim-1")
    assert not leases.done(old) and leases.failed(old, "lost") == (False, [])
    assert leases.done(new)


def test_a_lease_ends_unless_it_is_renewed() -> None:
    leases = table("a", "b")
    kept, lost = take(leases, now=0.0), take(leases, now=0.0)
    assert leases.renew(kept, 5.0)
    assert [lease.unit.unit_id for lease in leases.expired(10.0)] == [lost.unit.unit_id]


def test_given_back_is_no_attempt() -> None:
    leases = table("a")
    leases.give_back(take(leases))
    assert take(leases).unit.attempt == 0


def test_a_group_is_dropped_whole() -> None:
    leases = table("a", "b", "c", "d", a="g", b="g", c="g")
    assert leases.done(take(leases))
    other = take(leases)
    for _ in range(ATTEMPTS - 1):
        leases.failed(other, "hang")
        other = take(leases)
    running = take(leases)
    assert (other.unit.unit_id, running.unit.unit_id) == ("b", "c")
    assert leases.failed(other, "hang") == (False, ["b", "c"])
    assert not leases.done(running)
    assert take(leases).unit.unit_id == "d"


def test_a_unit_is_added_once() -> None:
    leases = table("a")
    with pytest.raises(UnknownUnit, match="unit a is in the table already"):
        leases.add(unit("a"))


class Leases(RuleBasedStateMachine):
    """Any order of events keeps the books."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(attempts=ATTEMPTS, lease_s=10.0)
        self.given: list[Lease] = []
        self.done: list[str] = []
        self.now = 0.0
        self.added = 0

    @rule(group=st.sampled_from(["", "g", "h"]), first=st.booleans())
    def add(self, group: str, first: bool) -> None:
        self.table.add(unit(f"u{self.added}"), group=group, first=first)
        self.added += 1

    @rule(holder=st.sampled_from(["sim-0", "sim-1"]))
    def take(self, holder: str) -> None:
        lease = self.table.take(holder, self.now)
        if lease is not None:
            assert lease.unit.unit_id not in self.done and lease.unit.attempt < ATTEMPTS
            self.given.append(lease)

    @rule(data=st.data(), what=st.sampled_from(["done", "failed", "give_back", "renew", "abandon"]))
    def say(self, data: Any, what: str) -> None:
        if not self.given:
            return
        lease = data.draw(st.sampled_from(self.given))
        if what == "done":
            if self.table.done(lease):
                self.done.append(lease.unit.unit_id)
        elif what == "failed":
            self.table.failed(lease, "step")
        elif what == "renew":
            self.table.renew(lease, self.now)
        else:
            getattr(self.table, what)(lease)

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.table.expired(self.now):
            self.table.failed(lease, "lost")

    @invariant()
    def the_books_balance(self) -> None:
        counts = self.table.statistics()
        ended = counts["done"] + counts["given_up"] + counts["dropped"] + counts["abandoned"]
        assert counts["added"] == ended + counts["waiting"] + counts["leased"]
        assert len(set(self.done)) == len(self.done) == counts["done"]


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
