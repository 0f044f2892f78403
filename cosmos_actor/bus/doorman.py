"""The side that listens: who has not introduced itself is nobody."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from .envelope import DATA, GOODBYE, HELLO, REFUSED, RESET, WELCOME, seal_control, unseal
from .errors import CorruptFrame
from .handshake import Introduction, from_payload, judge, judge_protocol, said, to_payload
from .lane import NUMBER
from .link import Link


class Doorman:
    """Binds accepted wires to links. Only HELLO is looked at on a wire that has no link."""

    def __init__(self, bus: Any) -> None:
        self.bus = bus
        self.refused = 0
        self._links: Dict[Any, Link] = {}

    def wire_up(self, wire: Any) -> None:
        """Accepted wires show themselves by their first message."""

    def wire_down(self, wire: Any, reason: str, refused: bool) -> None:
        if wire in self._links:
            self._links[wire].sharing.drain()
        self._down(wire)

    def _down(self, wire: Any) -> None:
        link = self._links.pop(wire, None)
        if link is not None and link.wire is wire:
            link.detach()
        if link is not None:
            self.bus.wire_lost(link)

    def wire_frames(self, wire: Any, frames: List[Any]) -> None:
        link = self._links.get(wire)
        try:
            if link is None:
                self._stranger(wire, frames)
                return
            for message in link.sharing.in_turn(frames):
                if self._links.get(wire) is link:
                    self._receive(wire, link, message)
        except CorruptFrame as error:
            self.bus.count_corrupt(str(link.peer) if link else wire.name, error)
            self._reset(wire)

    def _receive(self, wire: Any, link: Link, frames: List[Any]) -> None:
        _, kind, payload, arrays = link.unseal(frames)
        if kind == DATA:
            link.receive(payload, arrays)
        elif kind == GOODBYE:
            self.bus.said_goodbye(link, wire, said(payload, "no reason given"))
        else:
            raise CorruptFrame("a message that has no place here")

    def _stranger(self, wire: Any, frames: List[Any]) -> None:
        if len(frames) > 1 and len(frames[-1]) == NUMBER.size:
            frames = frames[:-1]  # of a link that had a lane
        protocol, kind, payload, _ = unseal(frames)
        if kind == HELLO:
            self._hello(wire, protocol, payload)
        else:
            self._reset(wire)  # it belonged to a link that is over, or to a wire that we closed

    def _reset(self, wire: Any) -> None:
        """The dialler makes a new wire and everything unfinished comes again."""
        wire.send(seal_control(RESET, None))
        self._down(wire)
        wire.close()

    def _hello(self, wire: Any, protocol: int, payload: Any) -> None:
        reason = judge_protocol(protocol)
        if reason is not None:
            self._refuse(wire, reason)
            return
        theirs = from_payload(payload)
        reason = judge(self.bus.introduction(theirs.session), theirs, wire.role) or self.bus.objection(theirs)
        if reason is not None:
            self._refuse(wire, reason)
            return
        self._welcome(wire, theirs)

    def _refuse(self, wire: Any, reason: str) -> None:
        self.refused += 1
        self.bus.log_refusal(wire.name, reason)
        wire.send(seal_control(REFUSED, [reason]))
        wire.close()

    def _welcome(self, wire: Any, theirs: Introduction) -> None:
        link, is_new = self._link_for(theirs)
        self._release(link)
        self._links[wire] = link
        sharing = self.bus.sharing()
        sharing.accept(theirs.shared, theirs.host_id)
        ours = self.bus.introduction(theirs.session, shared=sharing.offer())
        wire.send(seal_control(WELCOME, to_payload(ours)))
        link.out.on_wire_down = lambda reason: self._down(wire)
        link.attach(wire, sharing, lambda frames: self.wire_frames(wire, frames))
        if is_new:
            self.bus.link_is_up(link)

    def _link_for(self, theirs: Introduction) -> Tuple[Link, bool]:
        known: Optional[Link] = self.bus.links.get(theirs.actor)
        if known is not None and known.session == theirs.session:
            return known, False
        return self.bus.adopt(theirs, "", dialled=False), True

    def _release(self, link: Link) -> None:
        for wire in [wire for wire, owner in self._links.items() if owner is link]:
            del self._links[wire]
            wire.close()

    def link_over(self, link: Link) -> None:
        self._release(link)

    def statistics(self) -> Dict[str, int]:
        return {"refused": self.refused, "wires": len(self._links)}
