"""Which piece of work kills whoever takes it. Pure.

    with a member -> the member is lost -> suspected: asked again, alone at its member
                          ^--- the member dies again ---'  `-> answered: cleared
    `deaths` members of which it was with died -> guilty

Several questions are with a member at a time, and its death says nothing about which one it was. So a suspect is asked
again with nothing beside it: the next death is its own, and no innocent neighbour is ever found guilty with it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

DEATHS_KEPT = 256
"""Incarnations whose end is remembered; it is asked for within moments of it."""
LEFT_ALIVE = ("it said goodbye", "left:", "replaced by", "stopped", "closed", "dismissed")
"""How reasons begin for an end that no work has caused."""
SILENT = "no frame for"
"""How the reason begins when only its link was lost. A supervised process may be well: its supervisor says if not."""


@dataclass(frozen=True)
class Victim:
    """One process that died with the work in hand."""

    actor: str
    incarnation: str
    reason: str


class Suspects:
    """Work is named by whatever is the same each time it is asked."""

    def __init__(self, deaths: int) -> None:
        self._deaths = deaths
        self._lost: dict[Hashable, list[tuple[str, str]]] = {}
        self._died: dict[str, str] = {}

    def died(self, incarnation: str, reason: str, *, supervised: bool) -> None:
        """The head says that this incarnation is gone. Only the end of a process counts, not that of a link."""
        if reason.startswith(LEFT_ALIVE) or (supervised and reason.startswith(SILENT)):
            return
        self._died[incarnation] = reason
        while len(self._died) > DEATHS_KEPT:
            del self._died[next(iter(self._died))]

    def lost(self, work: Hashable, actor: str, incarnation: str) -> None:
        """`work` was with this incarnation when the link to it ended."""
        self._lost.setdefault(work, []).append((actor, incarnation))

    def cleared(self, work: Hashable) -> None:
        """It was answered, or is not asked any more."""
        self._lost.pop(work, None)

    def suspected(self, work: Hashable) -> bool:
        return work in self._lost

    def victims(self, work: Hashable) -> tuple[Victim, ...]:
        """Whom it was with when they died, the first one first."""
        return tuple(Victim(actor, incarnation, self._died[incarnation])
                     for actor, incarnation in self._lost.get(work, ()) if incarnation in self._died)

    def guilty(self, work: Hashable) -> bool:
        return len(self.victims(work)) >= self._deaths
