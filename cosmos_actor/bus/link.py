"""Two actors and what they have under way with each other. A link outlives its wires."""

from __future__ import annotations

import asyncio
from typing import Any, Callable, Coroutine, Dict, List, Optional, Sequence, Tuple

from .codec import ArrayReference
from .envelope import CALL, EVENT, GOODBYE, WORK, seal_control, unseal
from .errors import BusError, CorruptFrame, GapError, LinkClosed, PeerLost, copy_of
from .handshake import Introduction
from .identity import Identity
from .incoming import Incoming
from .limits import Limits
from .liveness import Liveness
from .outgoing import Outgoing, Packed
from .receipt import Receipt
from .schema import from_plain, to_plain
from .sharing import Sharing


class Link:
    """A live connection to one incarnation of one actor. Use it in the bus's event loop only.

        up <-> down (the wire broke, a new one is on its way; nothing is lost) -> over (`lost` says why)
    """

    def __init__(self, bus: Any, theirs: Introduction, address: str, dialled: bool) -> None:
        self.peer: Identity = theirs.identity
        self.host_id = theirs.host_id
        self.session = theirs.session
        self.address = address
        self.dialled = dialled
        self.lost: Optional[str] = None
        self._ended_with = BusError("the link is up")
        self.wire: Any = None
        """What the transport made; it is sent through `out.wire`."""
        self.sharing = Sharing(0)
        self.wires_used = 0
        self._bus = bus
        self._limits: Limits = bus.limits
        now = bus.clock.now()
        self.liveness = Liveness(
            now, interval_s=self._limits.heartbeat_interval_s, lost_after_s=self._limits.lost_after_s
        )
        self.out = Outgoing(str(self.peer), self._limits, theirs, bus.clock)
        self.out.on_not_accepted = self._take_back
        self.incoming = Incoming(self, self.out, bus.handlers, self._limits, bus.executor)

    def __repr__(self) -> str:
        return f"<Link to {self.peer} {'over' if self.lost else 'up' if self.up else 'down'}>"

    @property
    def up(self) -> bool:
        """Whether a wire carries it right now."""
        return self.out.wire is not None

    @property
    def actor(self) -> str:
        return self.peer.actor

    @property
    def role(self) -> str:
        return self.peer.role

    @property
    def states(self) -> Dict[str, Any]:
        """Topic -> latest value the peer has published."""
        return self.incoming.states

    # -- the four channels --------------------------------------------------------------------------------------

    async def send_work(self, message: Any, *, deadline_s: Optional[float] = None) -> Receipt:
        """Accepted under credit; the receipt's ``result`` waits until the peer's handler is through.

        At least once over broken connections, handled once per incarnation. Arrays must not be changed until it is
        done. Raises SchemaMismatch, MessageTooLarge, DeadlineExceeded (no credit in time), WouldBlock (no credit and
        `deadline_s` is 0), PeerLost, LinkClosed.
        """
        deadline_s = self._limits.default_deadline_s if deadline_s is None else deadline_s
        encoded = to_plain(message)
        if encoded[2].arrays or encoded[2].references:
            packed = await self.pack(message, None, deadline_s, encoded)
        else:
            packed = self.out.pack(message, None, encoded)
        receipt = self.out.try_send(WORK, packed)
        if receipt is None:
            return await self.out.send(WORK, packed, deadline_s)
        if not receipt.number % self._limits.batch_messages:
            await asyncio.sleep(0)  # a sender in a tight loop must not starve the readers
        return receipt

    async def call(self, message: Any, *, deadline_s: float, key: Optional[str] = None) -> Any:
        """The handler's answer. A repeated `key` gets the first answer without another run of the handler."""
        ends = self._bus.clock.now() + deadline_s
        receipt = await self.out.send(CALL, await self.pack(message, key, deadline_s), deadline_s, now=True)
        self.stay_awake()
        return await receipt.result(max(0.0, ends - self._bus.clock.now()))

    async def emit(self, message: Any, *, deadline_s: Optional[float] = None) -> Receipt:
        """An event: the peer's event handlers see all of a link's events in order, one at a time."""
        deadline_s = self._limits.default_deadline_s if deadline_s is None else deadline_s
        return await self.out.send(EVENT, await self.pack(message, None, deadline_s), deadline_s)

    def publish_state(self, message: Any, topic: str) -> None:
        """The topic's latest value; older ones that the peer has not been sent yet are skipped and counted.

        Arrays travel inside it, whatever their size: MessageTooLarge over `bus.max_message_bytes`.
        """
        self.share_state(message, topic, None)

    def share_state(self, message: Any, topic: str, packed: Optional[Packed]) -> Optional[Packed]:
        """The same for the bus: what is returned is given to the next link, so that many links pack it once."""
        if self.lost is None:
            if packed is None or packed.nbytes > self.out.max_bytes:
                packed = self.out.pack(message, topic)
            self.out.publish(topic, packed)
        return packed

    # -- arrays over the bulk plane -----------------------------------------------------------------------------

    @property
    def resolves_bulk(self) -> bool:
        return self._bus.resolve_bulk and self._bus.bulk is not None

    def bulk_concerns(self, encoded: Any) -> bool:
        """Whether `pack` has arrays to put into the store, or references to pass on."""
        return self._bus.bulk is not None and self._bus.bulk.concerns(encoded[2], self._inline_bytes)

    async def pack(self, message: Any, extra: Any, deadline_s: float, encoded: Any = None) -> Packed:
        """Large arrays go into the store, held for the peer; waits at most `deadline_s` for room there."""
        encoded = to_plain(message) if encoded is None else encoded
        if not self.bulk_concerns(encoded):
            return self.out.pack(message, extra, encoded)
        bulk, peer = self._bus.bulk, self.out.peer
        lent = await bulk.externalise(encoded[2], peer, self.host_id, self._inline_bytes, deadline_s)
        try:
            if self.lost is not None:  # meanwhile: what a peer holds is let go when its link ends, and never after
                raise copy_of(self._ended_with)
            return self.out.pack(message, extra, encoded)._replace(lent=lent)
        except BusError:
            bulk.take_back(lent, peer)
            raise

    async def fetch(self, wire_form: Tuple[Sequence[Any], Sequence[Any]], references: List[ArrayReference]) -> Any:
        """The message with arrays in its references' places."""
        arrays = await self._bus.bulk.resolve(references, self.out.peer, self._limits.default_deadline_s)
        return redecode(*wire_form, arrays)

    def borrow(self, references: Sequence[ArrayReference]) -> None:
        """References that nobody here resolves are given back when they are released or dropped."""
        if references and self._bus.bulk is not None and not self._bus.resolve_bulk:
            self._bus.bulk.borrow(references, self.out.peer)

    def lend_again(self, packed: Packed) -> None:
        """The peer gets this message under another number as well. Raises BulkGone."""
        self._bus.bulk.lend_again(packed.lent, self.out.peer)

    async def give_back(self, returned: Any) -> None:
        """Tell the peer which of its arrays are not used here any more."""
        try:
            await self.emit(returned)
        except (PeerLost, LinkClosed):
            pass  # Its end of the link drops what we held.

    def _take_back(self, packed: Packed) -> None:
        if packed.lent:
            self._bus.bulk.take_back(packed.lent, self.out.peer)

    @property
    def _inline_bytes(self) -> int:
        """Arrays of a message that stay in it: half of what it may have, the rest is for its texts and numbers."""
        return self.out.max_bytes // 2

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run it as long as the link lives."""
        task = asyncio.ensure_future(coroutine)
        self.incoming.tasks.add(task)
        task.add_done_callback(self.incoming.tasks.discard)

    # -- for the bus --------------------------------------------------------------------------------------------

    def attach(self, wire: Any, sharing: Sharing, receive: Callable[[List[Any]], None]) -> None:
        """Go on over this wire; `receive` gets what comes past its socket."""
        self.detach()
        self.wires_used += 1
        self.liveness.heard(self._bus.clock.now())
        self.wire = wire
        self.sharing = sharing
        self.out.attach(sharing.carry(wire))
        sharing.start(receive)
        if sharing.reader is not None:
            self.out.taken = 0
            self.out.flush_soon()

    def detach(self) -> None:
        self.wire = None
        self.out.detach()
        self.sharing.close()

    def unseal(self, frames: List[Any]) -> Tuple[int, int, Any, List[Any]]:
        """A message of the peer, with its arrays wherever they travelled."""
        reader = self.sharing.reader
        if reader is None:
            if frames and type(frames[0]) is tuple:
                raise CorruptFrame("a message in a ring that is not open")
            return unseal(frames)
        if frames and type(frames[0]) is tuple:
            frames = [reader.take(*frames[0])]
        opened = unseal(frames, reader)
        self.out.taken = reader.free()
        return opened

    def ring_taken(self, position: int) -> None:
        """The peer has our ring open, and has read everything before `position`. ValueError for what is not there."""
        self.out.ring = self.sharing.ring_taken(position)

    def receive(self, items: Any, frames: Sequence[Any]) -> None:
        if self.lost is not None:
            return  # it came while we were leaving
        self.liveness.heard(self._bus.clock.now())
        self._bus.busy_poll.heard()
        self.incoming.receive(items, frames)

    def stay_awake(self) -> None:
        """A call went or was answered: the other side's next word may come within microseconds."""
        if self.sharing.has_lane:
            self._bus.busy_poll.begin()

    def pulse(self, progress: int, busy_s: float, label: str) -> None:
        self.liveness.pulse(self._bus.clock.now(), progress, busy_s, label)

    def report_gap(self, error: GapError) -> None:
        self._bus.report_gap(self, error)

    def tick(self, now: float) -> Optional[str]:
        """Send the heartbeat that is due; the reason if the peer is lost."""
        self.liveness.look(now)
        self.beat(now)
        return self.liveness.lost(now)

    def beat(self, now: float) -> None:
        """Send the heartbeat that is due."""
        if self.liveness.due(now):
            self.out.pulse(self._bus.progress, self._bus.busy_s(now), self._bus.busy_label)

    def goodbye(self, reason: str) -> bool:
        """Whether there is a wire that takes it."""
        self.out.flush()
        return self.out.wire is not None and bool(self.out.wire.send(seal_control(GOODBYE, [reason])))

    def end(self, reason: str, *, closed_by_us: bool) -> int:
        """Over, for good. Returns how many messages of ours were not done."""
        if self.lost is not None:
            return 0
        self.lost = reason
        peer = str(self.peer)
        error: BusError = PeerLost(reason, peer=peer)
        if closed_by_us:
            error = LinkClosed(f"link closed: {reason}", peer=peer)
        self._ended_with = error
        lost = self.out.end(error)
        self.incoming.end()
        return lost

    def statistics(self) -> Dict[str, Any]:
        now = self._bus.clock.now()
        return {
            "peer": str(self.peer),
            "role": self.role,
            "up": self.up,
            "wires": self.wires_used,
            "liveness": self.liveness.statistics(now),
            "shared": self.sharing.statistics(),
            "sending": self.out.statistics(),
            "receiving": self.incoming.statistics(),
        }


def redecode(body: Sequence[Any], frames: Sequence[Any], arrays: Sequence[Any]) -> Any:
    """The message again, with these arrays in its references' places."""
    return from_plain(tuple(body[:3]), body[3], frames, arrays)[0]

