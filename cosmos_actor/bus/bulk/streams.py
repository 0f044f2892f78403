"""Fetches arrays from other hosts, several at a time, in a thread of its own: no byte of them passes the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, Optional, Tuple

import zmq

from ..errors import BulkError, BulkGone, BusError, CorruptFrame, DeadlineExceeded, PeerRefused
from ..keys import KeyRing
from ..socket import make_context
from .connection import DIALLING, Connection
from .incoming import Incoming
from .ref import BulkRef
from .settings import BulkSettings
from .waker import Waker
from .wire import No, pack_ask, unpack_reply

if TYPE_CHECKING:
    from numpy.typing import NDArray

LONGEST_POLL_S = 1.0
STOP_WITHIN_S = 5.0


class Fetch:
    """One fetch on its way between the event loop that waits for it and the thread that runs it."""

    def __init__(self, ref: BulkRef, kind: Any, now: float, deadline_s: float, silent_s: Optional[float]) -> None:
        self.ref = ref
        self.kind = kind
        self.begun = now
        self.deadline_s = deadline_s
        self.silent_s = deadline_s if silent_s is None else silent_s
        self.heard = now
        """When its turn came, or its last chunk."""
        self.incoming: Optional[Incoming] = None
        """None while the fetch waits for its turn."""
        self.ended = False
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[NDArray[Any]] = self._loop.create_future()

    @property
    def expires(self) -> float:
        """When it is over: at its deadline, or earlier if nothing more comes."""
        deadline = self.begun + self.deadline_s
        return deadline if self.incoming is None else min(deadline, self.heard + self.silent_s)

    @property
    def limit(self) -> str:
        """The one of its two limits that ends first."""
        silent = self.expires < self.begun + self.deadline_s
        return f"and nothing more for {self.silent_s:g} s" if silent else f"within {self.deadline_s:g} s"

    def end(self, array: Optional[NDArray[Any]], error: Optional[Exception] = None) -> None:
        self.ended = True
        try:
            self._loop.call_soon_threadsafe(self._set, array, error)
        except RuntimeError:
            pass  # The event loop was closed: nobody waits any more.

    def _set(self, array: Optional[NDArray[Any]], error: Optional[Exception]) -> None:
        if self.result.done():
            return
        if error is not None:
            self.result.set_exception(error)
        elif array is not None:
            self.result.set_result(array)


class StreamClient:
    """A fetch ends in one of four ways, within its deadline: all chunks verified, gone, corrupt, or out of time."""

    def __init__(
        self, settings: BulkSettings, keys: Optional[KeyRing] = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._keys = keys if settings.encrypt else None
        self._now = now
        self._new: Deque[Fetch] = deque()
        self._lost: Deque[Tuple[str, str]] = deque()
        self._waiting: Deque[Fetch] = deque()
        self._running: Dict[bytes, Fetch] = {}
        self._connections: Dict[Tuple[str, str], Connection] = {}
        self._thread: Optional[threading.Thread] = None
        self._waker = Waker()
        self._closing = False
        self._end_reason = "the bulk reader is closed"
        self._lock = threading.Lock()
        """For `_closing` together with `_new`: no fetch comes in after the last ones were ended."""
        self._counts = {"fetches": 0, "done": 0, "failed": 0, "asked_again": 0, "damaged": 0, "malformed": 0}

    async def fetch(
        self, ref: BulkRef, kind: Any, deadline_s: float, silent_s: Optional[float] = None
    ) -> NDArray[Any]:
        """The array. Raises BulkGone, BulkCorrupt, PeerRefused, DeadlineExceeded (with owner, array and progress).

        The last also when no chunk came for `silent_s`, counted from when the fetch has its turn.
        """
        fetch = Fetch(ref, kind, self._now(), deadline_s, silent_s)
        with self._lock:
            if self._closing:
                raise BulkGone(self._end_reason, peer=ref.owner)
            self._new.append(fetch)
            self._start()
        self._waker.set()
        try:
            return await fetch.result
        finally:
            fetch.ended = True
            self._waker.set()

    def forget(self, owner: str, incarnation: str) -> None:
        """End the fetches from this life of the owner with BulkGone."""
        self._lost.append((owner, incarnation))
        self._waker.set()

    def statistics(self) -> Dict[str, Any]:
        return {**self._counts, "running": len(self._running), "waiting": len(self._waiting) + len(self._new),
                "connections": len(self._connections)}

    def close(self) -> None:
        self._closing = True
        self._waker.set()
        if self._thread is None:
            self._waker.close()
        else:
            self._thread.join(STOP_WITHIN_S)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bulk-streams", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        self._context = make_context()
        try:
            while not self._closing:
                self._poll(self._turn(self._now()))
        except Exception as error:  # The outermost loop of this thread: whoever waits is told instead of hanging.
            self._end_reason = f"the stream thread failed: {error!r}"
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._closing = True
        for fetch in [*self._running.values(), *self._waiting, *self._new]:
            self._end(fetch, BulkGone(self._end_reason, peer=fetch.ref.owner))
        for connection in self._connections.values():
            connection.close()
        self._context.term()
        self._waker.close()

    def _turn(self, now: float) -> float:
        """Do all that can be done without waiting; returns when there will be something again if no socket wakes us."""
        self._admit(now)
        for connection in list(self._connections.values()):
            breaks = connection.breaks
            for frames in connection.turn(now):
                self._take(frames, now)
            if connection.breaks != breaks:
                self._note_break(connection)
        self._end_overdue(now)
        self._close_unused(lambda connection: not connection.up)
        return self._ask(now)

    def _poll(self, until: float) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        for connection in self._connections.values():
            for socket in connection.sockets():
                poller.register(socket, zmq.POLLIN)
        poller.poll(int(max(0.0, until - self._now()) * 1000) + 1)
        self._waker.clear()

    def _admit(self, now: float) -> None:
        while self._new:
            self._waiting.append(self._new.popleft())
            self._counts["fetches"] += 1
        while self._lost:
            self._end_lost(*self._lost.popleft())
        while self._waiting and len(self._running) < self._settings.streams:
            fetch = self._waiting.popleft()
            if not fetch.ended:
                self._begin(fetch, now)

    def _begin(self, fetch: Fetch, now: float) -> None:
        stream = os.urandom(8)
        try:
            self._connection(fetch.ref, now)
            fetch.incoming = Incoming(fetch.ref, fetch.kind, stream, self._settings)
        except (BusError, MemoryError) as error:
            self._end(fetch, error)
            return
        fetch.heard = now
        self._running[stream] = fetch

    def _connection(self, ref: BulkRef, now: float) -> Connection:
        key = (ref.address, ref.role)
        if key not in self._connections:
            server_key = None if self._keys is None else self._keys.key_of(ref.role)
            self._connections[key] = Connection(self._context, ref.address, self._keys, server_key, now)
        return self._connections[key]

    def _take(self, frames: List[Any], now: float) -> None:
        try:
            reply = unpack_reply(frames)
        except CorruptFrame:
            self._counts["malformed"] += 1
            return
        fetch = self._running.get(reply.stream if isinstance(reply, No) else reply.ask.stream)
        if fetch is None or fetch.incoming is None:
            return
        try:
            fetch.incoming.take(reply, now)
        except BulkError as error:
            self._end(fetch, error)
        else:
            fetch.heard = now
            if fetch.incoming.complete:
                self._end(fetch, None)

    def _note_break(self, connection: Connection) -> None:
        for fetch in self._running.values():
            if fetch.incoming is not None and self._connection_of(fetch) is connection:
                fetch.incoming.connection_broke()

    def _end_overdue(self, now: float) -> None:
        self._waiting = deque(fetch for fetch in self._waiting if not self._is_over(fetch, now))
        for fetch in list(self._running.values()):
            if not self._is_over(fetch, now):
                self._end_if_lost(fetch, now)

    def _is_over(self, fetch: Fetch, now: float) -> bool:
        """Complete, given up by who waited, or out of time."""
        if fetch.incoming is not None and fetch.incoming.complete:
            self._end(fetch, None)
        elif fetch.ended:
            self._forget(fetch)
        elif now >= fetch.expires:
            self._end(fetch, DeadlineExceeded(f"{self._progress(fetch)} {fetch.limit} from {fetch.ref.address}",
                                              peer=fetch.ref.owner, channel="bulk"))
        else:
            return False
        return True

    def _end_if_lost(self, fetch: Fetch, now: float) -> None:
        connection = self._connection_of(fetch)
        if connection.refusal is not None:
            self._end(fetch, PeerRefused(f"the bulk server at {connection.address}: {connection.refusal}",
                                         peer=fetch.ref.owner, channel="bulk"))
        elif not connection.up and now - max(connection.down_since, fetch.begun) >= self._settings.lost_s:
            self._end(fetch, self._lost_error(fetch, connection))

    def _lost_error(self, fetch: Fetch, connection: Connection) -> BulkGone:
        if connection.reason == DIALLING:  # a port that is closed refuses; this one does not even do that
            where = (f"nothing at {connection.address} has answered for {self._settings.lost_s:g} s (bulk.lost_s): a "
                     "firewall drops what is sent there, or that address is not the owner's as seen from here")
            setting: Optional[str] = "bus.host"
        else:
            where, setting = f"the owner's bulk server at {connection.address} is gone: {connection.reason}", None
        return BulkGone(f"{self._progress(fetch)}; {where}", peer=fetch.ref.owner, channel="bulk", setting=setting)

    def _end_lost(self, owner: str, incarnation: str) -> None:
        for fetch in [*self._running.values(), *self._waiting]:
            if (fetch.ref.owner, fetch.ref.incarnation) == (owner, incarnation):
                self._end(fetch, BulkGone(f"{self._progress(fetch)}; the owner is gone", peer=owner, channel="bulk"))
        self._close_unused(lambda connection: True)

    def _close_unused(self, which: Callable[[Connection], bool]) -> None:
        used = {(fetch.ref.address, fetch.ref.role) for fetch in self._running.values()}
        for key in [key for key, connection in self._connections.items() if key not in used and which(connection)]:
            self._connections.pop(key).close()

    def _ask(self, now: float) -> float:
        wake = now + LONGEST_POLL_S
        for fetch in self._running.values():
            connection = self._connection_of(fetch)
            wake = connection.next_event(min(wake, fetch.expires))
            if fetch.incoming is None or not connection.up:
                wake = min(wake, now + self._settings.lost_s)
                continue
            for ask in fetch.incoming.asks(now):
                connection.send(pack_ask(ask, fetch.ref.token))
            wake = connection.flush(now, fetch.incoming.next_overdue(wake))
        return min([wake, *(fetch.expires for fetch in self._waiting)])

    def _connection_of(self, fetch: Fetch) -> Connection:
        return self._connections[fetch.ref.address, fetch.ref.role]

    def _progress(self, fetch: Fetch) -> str:
        return f"{fetch.ref} is still waiting for its turn" if fetch.incoming is None else fetch.incoming.progress()

    def _end(self, fetch: Fetch, error: Optional[Exception]) -> None:
        self._forget(fetch)
        self._counts["done" if error is None else "failed"] += 1
        fetch.end(None if error is not None or fetch.incoming is None else fetch.incoming.array, error)

    def _forget(self, fetch: Fetch) -> None:
        fetch.ended = True
        if fetch.incoming is not None and self._running.pop(fetch.incoming.stream, None) is not None:
            found = fetch.incoming.statistics()
            self._counts["asked_again"] += found["asked_again"]
            self._counts["damaged"] += found["damaged"]
