"""Who may be linked with us. Pure.

One actor has one live link. An incarnation or session that was given up never comes back: what it had under way was
already told to be lost, and may run elsewhere by now. Of two actors that dial each other at once, the link that the
one with the smaller name has dialled stands, on both sides.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Optional, Tuple

from .handshake import Introduction
from .identity import Identity

STALE = "stale incarnation"
"""How the refusal of a life that was given up begins."""

REMEMBERED = 10_000
"""Dead incarnations and sessions kept in mind; a job that restarts every second for hours must not fill the memory."""


class Roster:
    """Says no to stale and doubled links, and which one of two has to go."""

    def __init__(self, own: Identity) -> None:
        self._own = own
        self._gone: OrderedDict[Tuple[str, str], str] = OrderedDict()
        self._over: OrderedDict[str, str] = OrderedDict()

    def forget(self, actor: str, incarnation: str, reason: str) -> None:
        """This life is over, whatever it says itself."""
        _remember(self._gone, (actor, incarnation), reason)

    def session_over(self, session: str, reason: str) -> None:
        """A link of this session ended; the same life may come with a new one."""
        _remember(self._over, session, reason)

    def objection(self, theirs: Introduction, known: Any) -> Optional[str]:
        """Why somebody who dials us may not come in; `known` is the live link to that actor, or None."""
        reason = self._gone.get((theirs.actor, theirs.incarnation)) or self._over.get(theirs.session)
        if reason is not None:
            return f"{STALE} {theirs.incarnation[:8]} of {theirs.actor}: {reason}"
        if known is None or known.session == theirs.session or known.peer.incarnation != theirs.incarnation:
            return None
        if known.dialled and self._own.actor < theirs.actor:
            return f"already linked: {self._own.actor} has dialled {theirs.actor}"
        return None

    def stands(self, known: Any, theirs: Introduction, dialled: bool) -> bool:
        """Whether the live link to the same actor stays, and the new one that just passed its handshake goes."""
        same = known.peer.incarnation == theirs.incarnation
        return bool(same and dialled and not known.dialled and known.up and theirs.actor < self._own.actor)

    def supersede(self, known: Any, theirs: Introduction) -> str:
        """The new one stays; the reason for ending the live one."""
        if known.peer.incarnation == theirs.incarnation:
            return "a new session"
        reason = f"superseded by incarnation {theirs.incarnation[:8]}"
        self.forget(known.peer.actor, known.peer.incarnation, reason)
        return reason


def _remember(table: Any, key: Any, reason: str) -> None:
    table[key] = reason
    while len(table) > REMEMBERED:
        table.popitem(last=False)
