"""The side that dials: one peer, wire after wire, until the link is over."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, List, Optional

from .envelope import DATA, GOODBYE, HELLO, REFUSED, RESET, WELCOME, seal_control, unseal
from .errors import BusError, CorruptFrame, DeadlineExceeded, PeerRefused
from .handshake import (
    KEY_NOT_LISTED,
    NO_CURVE,
    WRONG_SERVER_KEY,
    Introduction,
    from_payload,
    judge_protocol,
    judge_welcome,
    said,
    to_payload,
)
from .link import Link
from .receipt import until
from .sharing import Sharing

ANOTHER_ANSWERS = "another process answers at its address"
"""Its port is free only once it is gone: the link is over, and nothing of it is for the one that is there now."""


SUSPECTED_FOR = 0.25
"""The part of `bus.lost_after_s` for which a link is redialled at an address that seems to be another's."""


class Dialler:
    """Keeps one link supplied with wires.

        dialling -> HELLO sent -> welcomed: link up -> wire down -> dialling ... -> stopped
    """

    def __init__(self, bus: Any, address: str, role: str, actor: Optional[str]) -> None:
        self.bus = bus
        self.address = address
        self.role = role
        self.actor = actor
        self.session = uuid.uuid4().hex
        self.link: Optional[Link] = None
        self.last_trouble = "no attempt ended yet"
        self._wire: Any = None
        self._sharing: Optional[Sharing] = None
        self._hello_at: Optional[float] = None
        self._pause_s = bus.limits.redial_first_s
        self._suspicions, self._suspected_at = 0, 0.0
        self._stopped = False
        self._redial: Optional[asyncio.TimerHandle] = None
        self._loop = asyncio.get_running_loop()
        self._first: Any = self._loop.create_future()

    async def link_up(self, deadline_s: float) -> Link:
        """The link once it stands. PeerRefused: the other side (or we) said no. DeadlineExceeded: nobody answered."""
        self._dial()
        try:
            return await until(self._first, deadline_s, lambda: self._nobody(deadline_s))  # type: ignore[no-any-return]
        except BaseException:
            self.stop()
            raise

    def _nobody(self, deadline_s: float) -> BusError:
        text = f"no {self.role} at {self.address} within {deadline_s:g} s: {self.last_trouble}"
        return DeadlineExceeded(text, peer=self.actor or self.role, setting="connect")

    def _dial(self) -> None:
        self._redial = None
        self._hello_at = None
        self._wire = self.bus.transport.dial(self.address, self.role, self)

    def _introduction(self, shared: Any = None) -> Any:
        return self.bus.introduction(self.session, self.role, self.actor or "", shared)

    # -- the wire's owner ---------------------------------------------------------------------------------------

    def wire_up(self, wire: Any) -> None:
        if wire is not self._wire:
            return
        self._hello_at = self.bus.clock.now()
        self._sharing = self.bus.sharing()
        if not wire.send(seal_control(HELLO, to_payload(self._introduction(self._sharing.offer())))):
            self._broken("the connection takes nothing")

    def wire_frames(self, wire: Any, frames: List[Any]) -> None:
        if wire is not self._wire:
            return
        try:
            if self.link is None or self._hello_at is not None:
                self._receive(wire, frames)
                return
            for message in self.link.sharing.in_turn(frames):
                self._receive(wire, message)
        except CorruptFrame as error:
            self.bus.count_corrupt(self.address, error)
            self._broken(str(error))

    def _receive(self, wire: Any, frames: List[Any]) -> None:
        if wire is not self._wire:
            return
        protocol, kind, payload, arrays = unseal(frames) if self.link is None else self.link.unseal(frames)
        if kind == DATA and self.link is not None and self._hello_at is None:
            self.link.receive(payload, arrays)
        else:
            self._control(protocol, kind, payload)

    def wire_down(self, wire: Any, reason: str, refused: bool) -> None:
        if wire is not self._wire:
            return
        if self.link is not None:
            self.link.sharing.drain()
        if refused and self._is_final(reason):
            self._refused(reason if self.link is None else f"{ANOTHER_ANSWERS}: {reason}")
        else:
            self._broken(reason)

    def _is_final(self, reason: str) -> bool:
        """A listener that dies in the middle of a handshake, or a network that hangs up, looks like one with a wrong
        key: ask twice, and for a part of `bus.lost_after_s` where a link stands.

        One that only says nothing may be starting up: ask until the deadline.
        """
        now = self.bus.clock.now()
        if not reason.startswith(WRONG_SERVER_KEY):
            self._suspicions = 0
        elif not self._suspicions:
            self._suspected_at = now
        self._suspicions += reason.startswith(WRONG_SERVER_KEY)
        lasting = self.link is None or now - self._suspected_at >= SUSPECTED_FOR * self.bus.limits.lost_after_s
        return (self._suspicions >= 2 and lasting) or reason.startswith((KEY_NOT_LISTED, NO_CURVE))

    # -- the handshake ------------------------------------------------------------------------------------------

    def _control(self, protocol: int, kind: int, payload: Any) -> None:
        if kind == REFUSED:
            self._refused(said(payload, "no reason given"))
        elif judge_protocol(protocol) is not None:
            self._refused(str(judge_protocol(protocol)))
        elif kind == WELCOME:
            self._welcome(payload)
        elif kind == GOODBYE and self.link is not None:
            self.bus.said_goodbye(self.link, self._wire, said(payload, "no reason given"))
        elif kind == RESET:
            self._broken("the peer found this wire corrupt and closed it")

    def _welcome(self, payload: Any) -> None:
        theirs = from_payload(payload)
        reason = judge_welcome(self._introduction(), theirs)
        if reason is None and self.link is not None and theirs.incarnation != self.link.peer.incarnation:
            reason = f"{ANOTHER_ANSWERS}: {theirs.identity}"
        if reason is not None:
            self._refused(reason)
            return
        self._hello_at = None
        self._suspicions = 0
        self._pause_s = self.bus.limits.redial_first_s
        if self.link is None:
            link = self.bus.adopt(theirs, self.address, dialled=True)
            if link.session != self.session:
                self._yield_to(link)
                return
            self.link = link
        self.link.out.on_wire_down = self._broken
        wire = self._wire
        self.link.attach(wire, self._share(theirs), lambda frames: self.wire_frames(wire, frames))
        self._announce()

    def _share(self, theirs: Introduction) -> Sharing:
        """The link's from here on."""
        sharing, self._sharing = self._sharing or self.bus.sharing(), None
        sharing.accept(theirs.shared, theirs.host_id)
        return sharing

    def _announce(self) -> None:
        if not self._first.done() and self.link is not None:
            self._first.set_result(self.link)
            self.bus.link_is_up(self.link)

    def _yield_to(self, link: Link) -> None:
        """The peer dialled us at the same time, and its link is the one that stands."""
        self.stop()
        if not self._first.done():
            self._first.set_result(link)

    def _refused(self, reason: str) -> None:
        self.stop()
        if self.link is not None:
            self.bus.link_over(self.link, reason)
        if not self._first.done():
            self._first.set_exception(
                PeerRefused(f"{reason} [{self.address}]", peer=self.actor or self.role)
            )

    # -- trouble ------------------------------------------------------------------------------------------------

    def _broken(self, reason: str) -> None:
        """This wire is done for; the next one is dialled after a pause."""
        self.last_trouble = reason
        self._close_wire()
        if self._stopped or self._redial is not None:
            return
        self._redial = self._loop.call_later(self._pause_s, self._dial)
        self._pause_s = min(2 * self._pause_s, self.bus.limits.redial_last_s)

    def _close_wire(self) -> None:
        if self.link is not None:
            self.link.detach()
            self.bus.wire_lost(self.link)
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        if self._sharing is not None:
            self._sharing.close()
            self._sharing = None

    def tick(self, now: float) -> None:
        """A HELLO that nobody answers was lost, or the listener is stuck: try a new wire."""
        if self._hello_at is not None and now - self._hello_at > self.bus.limits.handshake_s:
            self._broken("connected, but no answer to HELLO")

    def stop(self) -> None:
        """No more wires. The bus forgets this dialler."""
        self._stopped = True
        self._close_wire()
        if self._redial is not None:
            self._redial.cancel()
            self._redial = None
        self.bus.diallers.discard(self)
