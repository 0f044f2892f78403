"""The bus of one actor: it listens, dials, and hands messages to handlers."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from .busy_poll import BusyPoll
from .clock import Clock
from .dialler import Dialler
from .doorman import Doorman
from .envelope import GOODBYE, seal_control
from .errors import BusError, CorruptFrame, GapError, KeyFileError
from .handlers import HandlerFunction, HandlerTable
from .handshake import Introduction, introduce
from .identity import Identity, host_id
from .keys import KeyRing
from .limits import Limits
from .link import Link
from .roster import Roster
from .schema import known_schemas, schema_key
from .sharing import Sharing

if TYPE_CHECKING:
    from .bulk.plane import BulkPlane
    from .bulk.reader import BulkReader
    from .bulk.settings import BulkSettings
    from .bulk.store import BulkStore

log = logging.getLogger(__name__)

SAID_GOODBYE = "it said goodbye"
"""How the reason of a link begins whose peer has closed it."""
TICKS_PER_HEARTBEAT = 4
"""Deadlines of peers are looked at this often, so that a loss is noticed at most a quarter heartbeat late."""


class CloseReport(NamedTuple):
    """What a bounded close left behind; all zero after a clean one."""

    undelivered: Dict[str, int]
    """Peer -> messages of ours that it was not done with."""
    stopped_handlers: int


class Bus:
    """One actor's end of all its links. Everything happens in the event loop in which ``start`` ran.

    Register handlers before ``start``: a peer's first message may come with its introduction.
    """

    def __init__(
        self,
        identity: Identity,
        transport: Any,
        keys: Optional[KeyRing],
        *,
        limits: Optional[Limits] = None,
        clock: Optional[Clock] = None,
        resolve_bulk: bool = True,
        executor: Optional[Executor] = None,
        bulk: Optional[BulkSettings] = None,
        schemas: Optional[Mapping[str, Tuple[int, int]]] = None,
    ) -> None:
        _check_keys(identity, keys)
        self.identity = identity
        self.transport = transport
        self.keys = keys
        self.limits = Limits() if limits is None else limits
        self.clock = Clock() if clock is None else clock
        self.resolve_bulk = resolve_bulk
        self.executor = executor
        self.bulk = None if bulk is None else _bulk_plane(identity, bulk, keys)
        self.busy_poll = BusyPoll(self.limits.busy_poll_us * 1e-6)
        self.handlers = HandlerTable()
        self.links: Dict[str, Link] = {}
        self.diallers: Set[Dialler] = set()
        self.address = ""
        self.progress = 0
        """Raise it whenever the actor has done something; peers see it in our heartbeats."""
        self.busy_label = ""
        self._busy_until = 0.0
        self._schemas = schemas
        self._doorman = Doorman(self)
        self._up: List[Callable[[Link], Any]] = []
        self._down: List[Callable[[Link, str], Any]] = []
        self._broken: List[Callable[[Link], Any]] = []
        self._gap: List[Callable[[Link, GapError], Any]] = []
        self._rule: Callable[[Introduction], Optional[str]] = lambda theirs: None
        self._published: Dict[str, Any] = {}
        self._roster = Roster(identity)
        self._counters = {"corrupt_frames": 0, "links_lost": 0, "gaps": 0}
        self._leaving: Set[Link] = set()
        self._ticker: Optional[asyncio.TimerHandle] = None
        self._state = "new"

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self, listen: Optional[str] = "tcp://127.0.0.1:0") -> str:
        """Listen (None: dial only) and begin to tick. Returns the address that others can dial.

        Raises AddressInUse, DescriptorLimit, KeyFileError.
        """
        self._loop = asyncio.get_running_loop()
        self.transport.open(self.identity, self.keys, self.limits)
        self._state = "running"  # only now: what could not be opened must not be closed
        if listen is not None:
            self.address = self.transport.listen(listen, self._doorman)
        if self.bulk is not None:
            self.bulk.start(self.address, self._give_back)
            self.handlers.add_event(self.bulk.returned_type, self._given_back)
            self.handlers.apart.add(schema_key(self.bulk.returned_type)[0])
        self._tick_later()
        return self.address

    async def connect(self, address: str, *, role: str, actor: Optional[str] = None, deadline_s: float = 5.0) -> Link:
        """A link to the actor that listens there; an existing live link to `actor` is returned as it is.

        Raises PeerRefused with the reason, or DeadlineExceeded when nobody answers.
        """
        self._check_running()
        known = self.links.get(actor) if actor else None
        if known is not None and (known.up or known.address == address):
            return known
        dialler = Dialler(self, address, role, actor)
        self.diallers.add(dialler)
        return await dialler.link_up(deadline_s)

    async def close(self, drain_s: float = 5.0) -> CloseReport:
        """Wait at most `drain_s` for what is under way, say goodbye, close. Never raises because of a peer."""
        if self._state != "running":
            return CloseReport({}, 0)
        await self._wait(self._busy_links, drain_s)
        self._state = "closed"
        if self._ticker is not None:
            self._ticker.cancel()
        stopped, undelivered = 0, {}
        for link in list(self.links.values()):
            stopped += link.incoming.cancel()
            if link.goodbye("closed"):
                self._leaving.add(link)
            left = link.end("closed", closed_by_us=True)
            undelivered.update({link.actor: left} if left else {})
        await self._wait(lambda: self._leaving, self.limits.linger_ms / 1000)
        for link in list(self.links.values()):
            self._ended(link, "closed")
        for dialler in list(self.diallers):
            dialler.stop()
        self.transport.close(self.limits.linger_ms)
        if self.bulk is not None:
            self.bulk.close()
        return CloseReport(undelivered, stopped)

    async def _wait(self, condition: Callable[[], Any], limit_s: float) -> None:
        ends = self._loop.time() + limit_s
        while condition() and self._loop.time() < ends:
            await asyncio.sleep(0.002)

    def _busy_links(self) -> bool:
        return any(link.out.under_way or link.incoming.running or link.incoming.tasks for link in self.links.values())

    def _check_running(self) -> None:
        if self._state != "running":
            raise BusError(f"the bus of {self.identity} is {self._state}: call start() first")

    # -- handlers -----------------------------------------------------------------------------------------------

    def serve(self, message_type: type, handler: HandlerFunction, *, concurrency: int = 1) -> None:
        """``handler(message, link)`` answers work and calls of this type with a message or None."""
        self.handlers.add_request(message_type, handler, concurrency)

    def serve_event(self, message_type: type, handler: HandlerFunction) -> None:
        """``handler(message, link)`` sees the events of this type."""
        self.handlers.add_event(message_type, handler)

    def serve_state(self, topic: str, handler: HandlerFunction) -> None:
        """``handler(message, link)`` sees the topic's latest value, of every peer that publishes it."""
        self.handlers.add_topic(topic, handler)

    def on_link_up(self, callback: Callable[[Link], Any]) -> None:
        self._up.append(callback)

    def on_link_down(self, callback: Callable[[Link, str], Any]) -> None:
        """Called once per link, when it is over for good (not while a new wire is being dialled)."""
        self._down.append(callback)

    def on_wire_down(self, callback: Callable[[Link], Any]) -> None:
        """Called when a connection broke under a link that is not over: the peer may be gone, or only the network."""
        self._broken.append(callback)

    def on_gap(self, callback: Callable[[Link, GapError], Any]) -> None:
        """Numbers were missing on a channel; they are asked for again."""
        self._gap.append(callback)

    def publish_state(self, topic: str, message: Any) -> None:
        """To every link there is and every link to come."""
        schema_key(message)
        self._published[topic] = message
        packed = None
        for link in self.links.values():
            packed = link.share_state(message, topic, packed)

    def declare_busy(self, label: str, expected_s: float) -> None:
        """Peers do not count silence against us for this long from now; 0 takes it back."""
        self.busy_label = label
        self._busy_until = self.clock.now() + expected_s
        for link in self.links.values():
            link.out.pulse(self.progress, expected_s, label)

    def beat(self) -> None:
        """Send the heartbeats that are due, from within a handler that lets no loop turn for long."""
        now = self.clock.now()
        for link in self.links.values():
            link.beat(now)

    def busy_s(self, now: float) -> float:
        return max(0.0, self._busy_until - now)

    # -- links --------------------------------------------------------------------------------------------------

    def forget(self, actor: str, incarnation: str, reason: str) -> None:
        """This incarnation is dead: its link ends now, receipts raise PeerLost, it is refused should it come back."""
        self._roster.forget(actor, incarnation, reason)
        link = self.links.get(actor)
        if link is not None and link.peer.incarnation == incarnation:
            self.link_over(link, reason)

    def introduction(
        self, session: str, wanted_role: str = "", wanted_actor: str = "", shared: Any = None
    ) -> Introduction:
        schemas = dict(known_schemas() if self._schemas is None else self._schemas)
        return introduce(self.identity, self.limits, schemas, host_id(), session, wanted_role, wanted_actor, shared)

    def sharing(self) -> Sharing:
        """Shared memory for one wire."""
        capacity = self.limits.shared_bytes if self.transport.between_processes else 0
        return Sharing(capacity, self.limits.max_frame_bytes)

    def objection(self, theirs: Introduction) -> Optional[str]:
        """Why this incarnation or session may not come in, or None."""
        return self._roster.objection(theirs, self.links.get(theirs.actor)) or self._rule(theirs)

    def admit_by(self, rule: Callable[[Introduction], Optional[str]]) -> None:
        """`rule` says why somebody who dials us may not come in, or None; asked after the bus's own rules."""
        self._rule = rule

    def adopt(self, theirs: Introduction, address: str, dialled: bool) -> Link:
        """The link for a peer that passed the handshake; an older one to the same actor ends."""
        known = self.links.get(theirs.actor)
        if known is not None:
            if self._roster.stands(known, theirs, dialled):
                return known
            self.link_over(known, self._roster.supersede(known, theirs))
        link = Link(self, theirs, address, dialled)
        self.links[theirs.actor] = link
        for topic, message in self._published.items():
            try:
                link.publish_state(message, topic)
            except BusError as error:
                log.warning("%s: %s does not get the state %s: %s", self.identity, link.peer, topic, error)
        return link

    def link_is_up(self, link: Link) -> None:
        for callback in self._up:
            self._loop.call_soon(callback, link)

    def said_goodbye(self, link: Link, wire: Any, reason: str) -> None:
        """The peer leaves, or answers our own goodbye. It is answered, so that it need not wait."""
        self._leaving.discard(link)
        if link.lost is None:
            wire.send(seal_control(GOODBYE, ["goodbye"]))
            self.link_over(link, f"{SAID_GOODBYE}: {reason}")

    def wire_lost(self, link: Link) -> None:
        """No answer to a goodbye will come any more, and whoever asked is told."""
        self._leaving.discard(link)
        if link.lost is None:
            for callback in self._broken:
                self._loop.call_soon(callback, link)

    def link_over(self, link: Link, reason: str) -> None:
        """For good: the peer is lost or said goodbye."""
        if link.lost is None:
            log.info("%s: link to %s is over: %s", self.identity, link.peer, reason)
            link.end(reason, closed_by_us=False)
            self._ended(link, reason)

    def _ended(self, link: Link, reason: str) -> None:
        self._roster.session_over(link.session, reason)
        self._counters["links_lost"] += 1
        self._doorman.link_over(link)
        link.sharing.close()
        if self.bulk is not None:
            self.bulk.peer_lost(link.peer)
        for dialler in [dialler for dialler in self.diallers if dialler.link is link]:
            dialler.stop()
        if self.links.get(link.actor) is link:
            del self.links[link.actor]
        for callback in self._down:
            self._loop.call_soon(callback, link, reason)

    # -- arrays by reference ------------------------------------------------------------------------------------

    @property
    def bulk_store(self) -> Optional[BulkStore]:
        """Where this actor keeps arrays for others; None without a bulk plane."""
        return None if self.bulk is None else self.bulk.store

    @property
    def bulk_reader(self) -> Optional[BulkReader]:
        """Fetches arrays of references that came some other way than in a message's array field."""
        return None if self.bulk is None else self.bulk.reader

    async def release(self, message: Any) -> None:
        """References in a message that was not resolved are not used here any more; a second time has no effect.

        What was sent on with them meanwhile stays its receivers' own. Dropping the message has the same effect.
        """
        if self.bulk is not None:
            self.bulk.release(message)

    def _give_back(self, peer: str, returned: Any) -> None:
        link = next((link for link in self.links.values() if str(link.peer) == peer), None)
        if link is not None:
            link.spawn(link.give_back(returned))

    async def _given_back(self, returned: Any, link: Link) -> None:
        if self.bulk is not None:
            self.bulk.given_back(str(link.peer), returned)

    # -- the tick -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at the clock: heartbeats that are due, peers that are lost, handshakes that hang."""
        now = self.clock.now()
        for link in list(self.links.values()):
            reason = link.tick(now)
            if reason is not None:
                self.link_over(link, reason + self._trouble(link))
        for dialler in list(self.diallers):
            dialler.tick(now)

    def _trouble(self, link: Link) -> str:
        """What dialling it again has come to, if it is a wire that is missing."""
        return "".join(f"; at {dialler.address}: {dialler.last_trouble}" for dialler in self.diallers
                       if dialler.link is link and link.wire is None)

    def _tick_later(self) -> None:
        self._ticker = self._loop.call_later(self.limits.heartbeat_interval_s / TICKS_PER_HEARTBEAT, self._on_timer)

    def _on_timer(self) -> None:
        self._tick_later()
        self.tick()

    # -- what happened ------------------------------------------------------------------------------------------

    def count_corrupt(self, peer: str, error: CorruptFrame) -> None:
        self._counters["corrupt_frames"] += 1
        log.warning("%s: wire to %s closed: %s", self.identity, peer, error)

    def log_refusal(self, peer: str, reason: str) -> None:
        log.warning("%s: refused %s: %s", self.identity, peer, reason)

    def report_gap(self, link: Link, error: GapError) -> None:
        self._counters["gaps"] += 1
        log.warning("%s: %s", self.identity, error)
        for callback in self._gap:
            self._loop.call_soon(callback, link, error)

    def statistics(self) -> Dict[str, Any]:
        """Counters since the start: of the bus, its transport, and each live link."""
        return {
            "identity": str(self.identity),
            "address": self.address,
            **self._counters,
            **self._doorman.statistics(),
            "transport": self.transport.statistics(),
            "bulk": None if self.bulk is None else self.bulk.statistics(),
            "links": {actor: link.statistics() for actor, link in self.links.items()},
        }


def _bulk_plane(identity: Identity, settings: BulkSettings, keys: Optional[KeyRing]) -> BulkPlane:
    from .bulk.plane import BulkPlane  # a bus without bulk needs no shared memory

    return BulkPlane(identity, settings, keys)


def _check_keys(identity: Identity, keys: Optional[KeyRing]) -> None:
    if keys is None:
        return
    if keys.run_id != identity.run_id:
        raise KeyFileError(f"the keys belong to run {keys.run_id}, the bus to {identity.run_id}", setting="keys")
    if keys.role != identity.role:
        raise KeyFileError(f"the keys belong to role {keys.role}, the bus to {identity.role}", setting="keys")
