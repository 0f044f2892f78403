"""Who is here: one live incarnation an actor, and who departed stays away."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.actors.messages import Announce
from cosmos_actor.actors.registry import DEPARTED_KEPT, Registry
from cosmos_actor.bus.identity import Identity


def identity(actor: str, incarnation: str) -> Identity:
    return Identity("run", actor.rpartition("-")[0], actor, incarnation)


def announce(port: int = 1, joined: bool = False) -> Announce:
    return Announce(address=f"tcp://h:{port}", pid=port, python="python", host="h", joined=joined)


def test_a_newer_incarnation_replaces_the_older_one_and_says_why():
    registry = Registry()
    registry.announce(identity("rollout-0", "1-a"), announce(1))
    membership = registry.announce(identity("rollout-0", "2-b"), announce(2))
    assert [(member.incarnation, member.pid) for member in membership.members] == [("2-b", 2)]
    assert membership.departed == {"1-a": "replaced by incarnation 2-b"}


def test_the_departure_of_an_old_incarnation_leaves_the_new_one_in_place():
    registry = Registry()
    registry.announce(identity("rollout-0", "1-a"), announce())
    registry.announce(identity("rollout-0", "2-b"), announce())
    membership = registry.departed("rollout-0", "1-a", "killed by SIGKILL")
    assert [member.incarnation for member in membership.members] == ["2-b"]


def test_the_serial_grows_with_every_change():
    registry = Registry()
    serials = [registry.announce(identity("data-0", "1"), announce()).serial, registry.leaving("data-0", "1").serial,
               registry.departed("data-0", "1", "gone").serial]
    assert serials == sorted(set(serials))


def test_a_leaving_member_stays_until_it_departs():
    registry = Registry()
    registry.announce(identity("rollout-7", "1"), announce(joined=True))
    assert registry.leaving("rollout-7", "0").members[0].leaving is False
    assert registry.leaving("rollout-7", "1").members[0].leaving is True
    assert registry.departed("rollout-7", "1", "left").members == []


def test_departures_are_kept_up_to_a_bound_newest_last():
    registry = Registry()
    for number in range(DEPARTED_KEPT + 3):
        registry.departed("rollout-0", str(number), "gone")
    departed = registry.membership().departed
    assert len(departed) == DEPARTED_KEPT and list(departed)[-1] == str(DEPARTED_KEPT + 2)


CHANGES = st.lists(st.tuples(
    st.sampled_from(["announce", "ready", "leaving", "departed"]), st.sampled_from(["echo-0", "echo-1"]),
    st.sampled_from(["1", "2", "3"])), max_size=30)


@given(CHANGES)
def test_what_was_noted_gives_the_same_table_again(changes: list[tuple[str, str, str]]):
    noted: list[Any] = [{"supervisor": "1:2:3"}]
    registry = Registry(noted.append)
    for change, actor, incarnation in changes:
        if change == "announce":
            registry.announce(identity(actor, incarnation), announce(joined=incarnation == "2"))
        elif change == "departed":
            registry.departed(actor, incarnation, f"gone {incarnation}")
        else:
            getattr(registry, change)(actor, incarnation)
    again = Registry()
    gone = again.replay(noted)
    assert sorted(again.membership().members, key=str) == sorted(registry.membership().members, key=str)
    assert again.membership().departed == registry.membership().departed
    assert {incarnation for _, incarnation, _ in gone} == set(registry.membership().departed)


def test_a_record_that_says_nothing_is_passed_over():
    again = Registry()
    good = {"gone": "1", "actor": "echo-0", "reason": "killed"}
    assert again.replay([{}, {"here": {"actor": "x"}}, {"here": 3}, {"gone": "2"}, good]) == [("echo-0", "1", "killed")]
