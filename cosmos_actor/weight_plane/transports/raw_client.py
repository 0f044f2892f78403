"""Fetches arrays by raw streams: several connections to one server share the pieces of all arrays that are wanted.

    fetch ──pieces──> queue of the address ──> lane 1 ... lane n, each a thread with one connection

A lane asks for the next piece before the present one has come, receives into the array itself, and gives back to the
queue what was on its way when its connection broke.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosmos_actor.bus.bulk.ref import BulkRef, storage_dtype
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.errors import BulkCorrupt, BulkGone, BusError, CorruptFrame, DeadlineExceeded
from cosmos_actor.weight_plane.transports import raw_wire as wire
from cosmos_actor.weight_plane.transports.interface import TransportLost
from cosmos_actor.weight_plane.transports.outcome import Outcome
from cosmos_actor.weight_plane.transports.raw_connection import RawConnection
from cosmos_actor.weight_plane.transports.raw_socket import Silent, host_and_port, receive_into

PIECE_BYTES = 4 * MIB
"""Large enough that an ask costs nothing beside it; small enough that several lanes share one bucket."""
ASKED_AHEAD = 2
"""Pieces of one lane on their way: the next is asked for while the present one comes."""
MOST_TRIES = 3
"""Of one piece: a connection that broke under it so often, or brought other bytes, is no accident."""
REDIAL_S = 0.1
IDLE_S = 20.0
"""A lane without work for so long hangs up."""
STOP_WITHIN_S = 5.0
CLOSED = "the reader is closed"


class _Fetch:
    """One array on its way between the event loop that waits for it and the lanes."""

    def __init__(self, ref: BulkRef, kind: Any) -> None:
        self.ref = ref
        self.array: np.ndarray = np.empty(ref.shape, kind)
        self.view = self.array.reshape(-1).view(np.uint8).data
        self.pieces = [_Piece(self, first, min(PIECE_BYTES, ref.nbytes - first))
                       for first in range(0, ref.nbytes, PIECE_BYTES)]
        self.came = 0
        self.ended = False
        self.last_trouble = ""
        self._lock = threading.Lock()
        self.outcome: Outcome[None] = Outcome()

    def piece_came(self) -> None:
        with self._lock:
            self.came += 1
            whole = self.came == len(self.pieces)
        if whole:
            self.end(None)

    def end(self, error: BusError | None) -> None:
        self.ended = True
        if error is None:
            self.outcome.bring(None)
        else:
            self.outcome.fail(error)

    def progress(self) -> str:
        trouble = f"; {self.last_trouble}" if self.last_trouble else ""
        return f"{self.came} of {len(self.pieces)} pieces of {self.ref} came from {self.ref.address}{trouble}"


@dataclass
class _Piece:
    fetch: _Fetch
    first: int
    length: int
    tries: int = 0
    ask: wire.Ask | None = None

    @property
    def view(self) -> memoryview:
        return self.fetch.view[self.first:self.first + self.length]


class _Source:
    """One server: what is wanted of it, and since when it can not be reached."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.wanted: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self.lanes: set[_Lane] = set()
        self.down_since: float | None = None


class RawClient:
    """A fetch ends within its deadline in one of four ways: whole, gone, corrupt, or out of time.

    `digested`: each piece carries a digest under the reference's secret, so that nobody on the way can change it.
    Without, only the heads of the pieces do: accidents are then for the reader of the array to find.
    """

    def __init__(self, settings: BulkSettings, *, streams: int = 4, digested: bool = True) -> None:
        self.settings, self.digested = settings, digested
        self._streams = streams
        self._sources: dict[str, _Source] = {}
        self._lock = threading.Lock()
        """For the sources and their lanes."""
        self.closing = False
        self.counts: Counter[str] = Counter()

    async def fetch(self, ref: BulkRef, *, deadline_s: float, silent_s: float | None = None) -> np.ndarray:
        """See `Transport`. DeadlineExceeded also when no piece came for `silent_s`."""
        kind = storage_dtype(ref, self.settings.max_array_bytes)
        host_and_port(ref.address)
        fetch = _Fetch(ref, kind)
        if fetch.pieces:
            self._want(fetch)
            await self._wait(fetch, deadline_s, deadline_s if silent_s is None else silent_s)
        fetch.array.flags.writeable = False
        self.counts["streamed"] += 1
        self.counts["streamed_bytes"] += ref.nbytes
        return fetch.array

    def check(self, ref: BulkRef) -> None:
        """What was streamed stays."""

    def statistics(self) -> dict[str, Any]:
        with self._lock:
            return {**self.counts, "lanes": sum(len(source.lanes) for source in self._sources.values())}

    def close(self) -> None:
        """Hang up; who waits is told. Within STOP_WITHIN_S."""
        self.closing = True
        with self._lock:
            sources = list(self._sources.values())
            lanes = [lane for source in sources for lane in source.lanes]
        for lane in lanes:
            lane.source.wanted.put(None)
            lane.hang_up()
        until = time.monotonic() + STOP_WITHIN_S
        for lane in lanes:
            lane.join(max(0.0, until - time.monotonic()))
            lane.tell(BulkGone(CLOSED))  # It may still dial.
        for source in sources:
            self.fail_all(source, BulkGone(CLOSED))

    async def _wait(self, fetch: _Fetch, deadline_s: float, silent_s: float) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + deadline_s
        came = -1
        try:
            while not fetch.outcome.there and clock() < until and came != fetch.came:
                came = fetch.came
                await fetch.outcome.wait(min(silent_s, until - clock()))
            if fetch.outcome.there:
                return fetch.outcome.take()
        finally:
            fetch.ended = True
            fetch.outcome.leave()
        limit = f"within {deadline_s:g} s" if clock() >= until else f"and nothing more for {silent_s:g} s"
        raise DeadlineExceeded(f"{fetch.progress()} {limit}", peer=fetch.ref.owner, channel="weights",
                               setting="weights.deadline_s")

    def _want(self, fetch: _Fetch) -> None:
        with self._lock:
            if self.closing:
                raise BulkGone(CLOSED, peer=fetch.ref.owner, channel="weights")
            source = self._sources.setdefault(fetch.ref.address, _Source(fetch.ref.address))
            for piece in fetch.pieces:
                source.wanted.put(piece)
            for _ in range(min(self._streams - len(source.lanes), source.wanted.qsize())):
                lane = _Lane(self, source)
                source.lanes.add(lane)
                lane.start()

    def next_piece(self, lane: _Lane, wait_s: float) -> _Piece | None:
        """The next one that somebody still waits for. None: there is none for so long, or the client closes."""
        while True:
            try:
                piece = lane.source.wanted.get(timeout=wait_s) if wait_s else lane.source.wanted.get_nowait()
            except queue.Empty:
                return None
            if piece is None or not piece.fetch.ended:
                return piece

    def may_end(self, lane: _Lane) -> bool:
        """Whether this lane ends for want of work. No piece is left behind: it would wait for ever."""
        with self._lock:
            if not lane.source.wanted.empty() and not self.closing:
                return False
            lane.source.lanes.discard(lane)
            if not lane.source.lanes:
                self._sources.pop(lane.source.address, None)
            return True

    def fail_all(self, source: _Source, error: BusError, trouble: str = "") -> None:
        """Whoever wants something of this server is told."""
        while True:
            try:
                piece = source.wanted.get_nowait()
            except queue.Empty:
                return
            if piece is None:
                source.wanted.put(None)  # It is for a lane that is to end.
                return
            piece.fetch.last_trouble = trouble
            piece.fetch.end(type(error)(f"{piece.fetch.progress()}; {error.text}", peer=piece.fetch.ref.owner,
                                        channel="weights"))


class _Lane(threading.Thread):
    """One connection at a time, dialled again when it broke, as long as there is work."""

    def __init__(self, client: RawClient, source: _Source) -> None:
        super().__init__(name="raw-lane", daemon=True)
        self.source = source
        self._client = client
        self._connection: RawConnection | None = None
        self._asked: deque[_Piece] = deque()

    def run(self) -> None:
        while True:
            piece = self._client.next_piece(self, IDLE_S)
            if piece is None:
                if self._client.may_end(self):
                    break
                continue
            try:
                self._bring(piece)
            except (OSError, CorruptFrame) as error:
                self._broke(error)
            except Exception as error:  # The outermost loop of this thread: whoever waits is told instead of hanging.
                self._fail(TransportLost(f"a raw stream failed: {error!r}", peer=piece.fetch.ref.owner))
        self.hang_up()

    def hang_up(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.close()

    def tell(self, error: BusError) -> None:
        """Whoever waits for what it has on its way."""
        for piece in tuple(self._asked):
            piece.fetch.end(error)

    def _bring(self, piece: _Piece) -> None:
        """This piece, and those that can be asked for while it comes."""
        self._asked.append(piece)  # Before anything that may fail: what stands there is never lost.
        if self._connection is None:
            self._connection = RawConnection(self.source.address, self._client.settings.overdue_s)
            if self._client.closing:  # which found no connection to hang up
                raise ConnectionError(CLOSED)
            self.source.down_since = None
        self._ask(piece)
        while self._asked:
            if len(self._asked) < ASKED_AHEAD and (more := self._client.next_piece(self, 0.0)) is not None:
                self._asked.append(more)
                self._ask(more)
            self._take()

    def _ask(self, piece: _Piece) -> None:
        assert self._connection is not None
        kind = wire.DIGESTED if self._client.digested else wire.PLAIN
        piece.ask = self._connection.ask(kind, piece.fetch.ref, piece.first, piece.length)

    def _take(self) -> None:
        assert self._connection is not None
        piece = self._asked[0]
        assert piece.ask is not None
        try:
            answer = self._connection.answer(piece.ask, piece.fetch.ref)
        except BulkGone as error:
            self._asked.popleft()
            piece.fetch.end(error)
            return
        if not receive_into(self._connection.socket, piece.view):
            raise ConnectionError("the connection was closed")
        self._asked.popleft()
        if self._connection.holds(piece.ask, answer, piece.fetch.ref, piece.view):
            piece.fetch.piece_came()
            return
        self._client.counts["damaged"] += 1
        piece.tries += 1
        if piece.tries < MOST_TRIES:
            self._again(piece)
        else:
            piece.fetch.end(BulkCorrupt(f"a piece has another digest, {MOST_TRIES} times; {piece.fetch.progress()}",
                                        peer=piece.fetch.ref.owner, channel="weights"))

    def _again(self, piece: _Piece) -> None:
        if self._client.closing:
            piece.fetch.end(BulkGone(CLOSED, peer=piece.fetch.ref.owner, channel="weights"))
        elif not piece.fetch.ended:
            self._client.counts["asked_again"] += 1
            self.source.wanted.put(piece)

    def _broke(self, error: Exception) -> None:
        """What was on its way is asked for again; a server that stays away, or silent, is given up."""
        now = time.monotonic()
        dialling = self._connection is None
        self.hang_up()
        self._connection = None
        said = _line_of(error, dialling)
        self._client.counts["breaks"] += 1
        while self._asked:
            piece = self._asked.popleft()
            piece.fetch.last_trouble = said
            piece.tries += 0 if dialling else 1
            if piece.tries < MOST_TRIES:
                self._again(piece)
            else:
                piece.fetch.end(TransportLost(piece.fetch.progress(), peer=piece.fetch.ref.owner, channel="weights"))
        if not dialling or self._client.closing:
            return
        self.source.down_since = self.source.down_since or now
        away_s = now - self.source.down_since
        if isinstance(error, (TimeoutError, Silent, CorruptFrame)) or away_s >= self._client.settings.lost_s:
            self._client.fail_all(self.source, BulkGone("the owner's server is not to be had"), said)
        else:
            time.sleep(REDIAL_S)

    def _fail(self, error: BusError) -> None:
        self.hang_up()
        self._connection = None
        while self._asked:
            self._asked.popleft().fetch.end(error)


def _line_of(error: Exception, dialling: bool) -> str:
    if isinstance(error, TimeoutError) and dialling:
        return "nobody answers there (is the port closed by a firewall, or the host gone?)"
    if isinstance(error, Silent):
        return f"the other end is silent ({error})"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    return str(error) or type(error).__name__
