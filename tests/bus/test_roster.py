from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cosmos_actor.bus import Identity, Limits
from cosmos_actor.bus.handshake import Introduction, introduce
from cosmos_actor.bus.roster import REMEMBERED, Roster

OWN = Identity("run", "policy", "m-policy", "life-0")


def peer(actor: str, incarnation: str = "life-1", session: str = "s1") -> Introduction:
    return introduce(Identity("run", "rollout", actor, incarnation), Limits(), {}, "host", session)


def link(theirs: Introduction, *, dialled: bool, up: bool = True) -> Any:
    return SimpleNamespace(peer=theirs.identity, session=theirs.session, dialled=dialled, up=up)


def test_a_stranger_may_come_in() -> None:
    assert Roster(OWN).objection(peer("a"), None) is None


def test_a_forgotten_life_stays_out_with_its_reason_and_another_life_does_not() -> None:
    roster = Roster(OWN)
    roster.forget("a", "life-1", "killed by SIGKILL")
    assert roster.objection(peer("a"), None) == "stale incarnation life-1 of a: killed by SIGKILL"
    assert roster.objection(peer("a", "life-2"), None) is None
    assert roster.objection(peer("b"), None) is None


def test_a_session_that_is_over_stays_out_and_the_same_life_may_begin_anew() -> None:
    roster = Roster(OWN)
    roster.session_over("s1", "no frame for 10 s")
    assert "no frame for 10 s" in str(roster.objection(peer("a"), None))
    assert roster.objection(peer("a", session="s2"), None) is None


def test_the_smaller_names_dial_stands_on_both_sides() -> None:
    roster, newer = Roster(OWN), "s2"
    smaller, larger = peer("a", session=newer), peer("z", session=newer)
    ours_to_z, ours_to_a = link(peer("z"), dialled=True), link(peer("a"), dialled=True)
    assert "already linked: m-policy has dialled z" in str(roster.objection(larger, ours_to_z))
    assert roster.objection(smaller, ours_to_a) is None
    assert roster.stands(link(peer("a"), dialled=False), smaller, dialled=True)
    assert not roster.stands(link(peer("z"), dialled=False), larger, dialled=True)
    assert not roster.stands(link(peer("a"), dialled=False, up=False), smaller, dialled=True)


def test_the_same_session_over_a_new_wire_is_welcome() -> None:
    assert Roster(OWN).objection(peer("z"), link(peer("z"), dialled=False)) is None


def test_a_new_life_supersedes_the_old_one_for_good() -> None:
    roster, old, new = Roster(OWN), peer("a"), peer("a", "life-2", "s2")
    assert roster.supersede(link(old, dialled=False), new) == "superseded by incarnation life-2"
    assert "superseded by incarnation life-2" in str(roster.objection(peer("a", session="s3"), None))
    assert roster.supersede(link(new, dialled=False), peer("a", "life-2", "s4")) == "a new session"
    assert roster.objection(peer("a", "life-2", "s5"), None) is None


def test_the_dead_do_not_fill_the_memory() -> None:
    roster = Roster(OWN)
    for number in range(REMEMBERED + 5):
        roster.forget("a", f"life-{number}", "dead")
        roster.session_over(f"s{number}", "over")
    assert roster.objection(peer("a", "life-4", "s4"), None) is None
    assert roster.objection(peer("a", "life-5", "s4"), None) is not None
