"""Who is here: the pure table behind the head's membership.

Invariant: at most one live incarnation per actor name, and an incarnation that departed never comes back.

Each change is told to `note` as a plain record, and `replay` of all records so far is the same table again:
{"here": a member} or {"gone": incarnation, "actor": name, "reason": why}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from cosmos_actor.actors.messages import Announce, Member, Membership, plain
from cosmos_actor.bus.identity import Identity

DEPARTED_KEPT = 64
"""Departure reasons carried in a membership. Without a bound a long run's membership outgrows a message."""


class Registry:
    """Turns announcements and departures into memberships with a growing serial. No sockets, no clock."""

    def __init__(self, note: Callable[[Mapping[str, Any]], None] = lambda record: None) -> None:
        self._members: dict[str, Member] = {}
        self._departed: dict[str, str] = {}
        self._serial = 0
        self._note = note

    def replay(self, records: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
        """Become what was noted; (actor, incarnation, reason) of all departures. A record that says nothing is
        passed over."""
        gone = []
        for record in records:
            try:
                if "here" in record:
                    member = Member(**record["here"])
                    self._members[member.actor] = member
                elif "gone" in record:
                    actor, incarnation, reason = record["actor"], record["gone"], record["reason"]
                    gone.append((actor, incarnation, reason))
                    self._forget(actor, incarnation)
                    self._keep_reason(incarnation, reason)
            except (KeyError, TypeError):
                continue  # of a later version, or damaged: who is here will say so himself
            self._serial += 1
        return gone

    def announce(self, identity: Identity, announce: Announce) -> Membership:
        """`identity` is here. An older incarnation of the same actor is thereby gone."""
        older = self._members.get(identity.actor)
        if older is not None and older.incarnation != identity.incarnation:
            self._gone(older.actor, older.incarnation, f"replaced by incarnation {identity.incarnation}")
            older = None
        self._here(Member(
            role=identity.role, actor=identity.actor, incarnation=identity.incarnation, address=announce.address,
            pid=announce.pid, python=announce.python, host=announce.host, joined=announce.joined,
            ready=older is not None and older.ready, leaving=older is not None and older.leaving))
        return self._changed()

    def ready(self, actor: str, incarnation: str) -> Membership:
        """`actor` is through with its setup."""
        return self._mark(actor, incarnation, ready=True)

    def leaving(self, actor: str, incarnation: str) -> Membership:
        """`actor` finishes what it holds and takes no more."""
        return self._mark(actor, incarnation, leaving=True)

    def departed(self, actor: str, incarnation: str, reason: str) -> Membership:
        """This incarnation is gone for `reason`; a newer one of the same actor stays untouched."""
        self._gone(actor, incarnation, reason)
        return self._changed()

    def member(self, actor: str) -> Member | None:
        return self._members.get(actor)

    def membership(self) -> Membership:
        return Membership(serial=self._serial, members=list(self._members.values()), departed=dict(self._departed))

    def statistics(self) -> dict[str, int]:
        return {"members": len(self._members), "departed": len(self._departed), "serial": self._serial}

    def _mark(self, actor: str, incarnation: str, **marks: bool) -> Membership:
        member = self._members.get(actor)
        if member is not None and member.incarnation == incarnation:
            self._here(replace(member, **marks))
        return self._changed()

    def _here(self, member: Member) -> None:
        self._members[member.actor] = member
        self._note({"here": plain(member)})

    def _gone(self, actor: str, incarnation: str, reason: str) -> None:
        self._forget(actor, incarnation)
        self._keep_reason(incarnation, reason)
        self._note({"gone": incarnation, "actor": actor, "reason": reason})

    def _forget(self, actor: str, incarnation: str) -> None:
        member = self._members.get(actor)
        if member is not None and member.incarnation == incarnation:
            del self._members[actor]

    def _keep_reason(self, incarnation: str, reason: str) -> None:
        self._departed.setdefault(incarnation, reason)
        while len(self._departed) > DEPARTED_KEPT:
            self._departed.pop(next(iter(self._departed)))

    def _changed(self) -> Membership:
        self._serial += 1
        return self.membership()
