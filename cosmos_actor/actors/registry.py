"""Who is here: the pure table behind the head's membership.

Invariant: at most one live incarnation per actor name, and an incarnation that departed never comes back.
"""

from __future__ import annotations

from dataclasses import replace

from cosmos_actor.actors.messages import Announce, Member, Membership
from cosmos_actor.bus.identity import Identity

DEPARTED_KEPT = 64
"""Departure reasons carried in a membership. Without a bound a long run's membership outgrows a message."""


class Registry:
    """Turns announcements and departures into memberships with a growing serial. No sockets, no clock."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._departed: dict[str, str] = {}
        self._serial = 0

    def announce(self, identity: Identity, announce: Announce) -> Membership:
        """`identity` is here. An older incarnation of the same actor is thereby gone."""
        older = self._members.get(identity.actor)
        if older is not None and older.incarnation != identity.incarnation:
            self._note_departure(older.incarnation, f"replaced by incarnation {identity.incarnation}")
        self._members[identity.actor] = Member(
            role=identity.role, actor=identity.actor, incarnation=identity.incarnation, address=announce.address,
            pid=announce.pid, python=announce.python, host=announce.host, joined=announce.joined, ready=False,
            leaving=False)
        return self._changed()

    def ready(self, actor: str, incarnation: str) -> Membership:
        """`actor` is through with its setup."""
        return self._mark(actor, incarnation, ready=True)

    def leaving(self, actor: str, incarnation: str) -> Membership:
        """`actor` finishes what it holds and takes no more."""
        return self._mark(actor, incarnation, leaving=True)

    def departed(self, actor: str, incarnation: str, reason: str) -> Membership:
        """This incarnation is gone for `reason`; a newer one of the same actor stays untouched."""
        member = self._members.get(actor)
        if member is not None and member.incarnation == incarnation:
            del self._members[actor]
        self._note_departure(incarnation, reason)
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
            self._members[actor] = replace(member, **marks)
        return self._changed()

    def _note_departure(self, incarnation: str, reason: str) -> None:
        self._departed.setdefault(incarnation, reason)
        while len(self._departed) > DEPARTED_KEPT:
            self._departed.pop(next(iter(self._departed)))

    def _changed(self) -> Membership:
        self._serial += 1
        return self.membership()
