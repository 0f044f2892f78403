"""Who is linked with whom, and whether that is how it should be. Pure: what each actor said in, edges out.

Invariant: an edge is up only if both of its ends say so. One that does not answer says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cosmos_actor.actors.messages import LinkReport
from cosmos_actor.actors.role_names import REGISTRY_ACTOR

HEAD, CONTROLLER = REGISTRY_ACTOR, "controller-0"
"""Everybody dials the head, and the controller dials everybody (actors/fleet.py)."""

Links = dict[str, LinkReport]
"""What one actor said: peer -> its end of the link."""


@dataclass(frozen=True)
class Edge:
    """Two actors. Pairs of figures are `a`'s towards `b`, then `b`'s towards `a`; None: that end did not say."""

    a: str
    b: str
    up: bool
    wanted: bool
    """It should be up."""
    why: str
    """Empty when it is up."""
    wires: int = 0
    silent_s: float | None = None
    busy: str = ""
    under_way: tuple[int | None, int | None] = (None, None)
    credit_messages: int | None = None
    credit_bytes: int | None = None
    lane: bool = False
    lane_messages: int = 0
    ring_arrays: int = 0

    @property
    def bad(self) -> bool:
        return self.wanted and not self.up


def wanted_edges(actors: Iterable[str]) -> set[tuple[str, str]]:
    """The pairs that a running job keeps up, each with the head or the controller first."""
    names = sorted(actors)
    hubs = [hub for hub in (HEAD, CONTROLLER) if hub == HEAD or hub in names]
    return {(hub, name) for hub in hubs for name in names if name not in (hub, HEAD)}


def edges(said: Mapping[str, Links | str], actors: Collection[str]) -> list[Edge]:
    """Every edge that should be, and every other one that somebody reports between known actors.

    `said`: of each actor that was asked its links, or why it did not answer. `actors`: those that should be here.
    """
    wanted = wanted_edges(actors)
    known = {HEAD, *actors, *said}
    found = {(actor, peer) for actor, links in said.items() if not isinstance(links, str) for peer in links
             if peer in known}
    others = {(a, b) for a, b in found if a < b or (b, a) not in found} - wanted - {(b, a) for a, b in wanted}
    return [_edge(a, b, said, wanted=True) for a, b in sorted(wanted)] + [
        _edge(a, b, said, wanted=False) for a, b in sorted(others)]


def _edge(a: str, b: str, said: Mapping[str, Links | str], *, wanted: bool) -> Edge:
    ends = [_end(a, b, said), _end(b, a, said)]
    seen = [end for end in ends if isinstance(end, LinkReport)]
    troubles = [end for end in ends if isinstance(end, str)]
    troubles += [f"{name} has no wire now, {end.wires} used so far" for name, end in zip((a, b), ends, strict=True)
                 if isinstance(end, LinkReport) and not end.up]
    why = "; ".join(dict.fromkeys(troubles))
    if not seen:
        return Edge(a, b, False, wanted, why)
    first, second = (end if isinstance(end, LinkReport) else None for end in ends)
    return Edge(
        a, b, not why, wanted, why, wires=max(end.wires for end in seen), silent_s=max(end.silent_s for end in seen),
        busy=next((end.busy for end in seen if end.busy), ""),
        under_way=(first.under_way if first else None, second.under_way if second else None),
        credit_messages=min(end.credit_messages for end in seen), credit_bytes=min(end.credit_bytes for end in seen),
        lane=any(end.lane for end in seen), lane_messages=sum(end.lane_messages for end in seen),
        ring_arrays=sum(end.ring_arrays for end in seen))


def _end(actor: str, peer: str, said: Mapping[str, Links | str]) -> LinkReport | str:
    """How `actor` sees its link to `peer`, or why nothing can be said."""
    links = said.get(actor)
    if links is None:
        return f"{actor} is not in the run"
    if isinstance(links, str):
        return f"{actor} does not answer: {links}"
    return links.get(peer) or f"{actor} has no link to {peer}"
