"""Serves one store over plain TCP to whoever proves to have a reference: a thread a connection, no copy of its own."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.bulk.wire import same
from cosmos_actor.bus.errors import CorruptFrame
from cosmos_actor.weight_plane.errors import WeightError
from cosmos_actor.weight_plane.transports import raw_wire as wire
from cosmos_actor.weight_plane.transports.giving import Giving, GivingRefused
from cosmos_actor.weight_plane.transports.raw_socket import (
    address_of,
    be_patient,
    listen,
    receive,
    send,
    set_up,
    shut,
    take_leave,
)

log = logging.getLogger(__name__)

FIRST_ASK_S = 10.0
"""Who connects and proves nothing for so long is hung up on: it would hold a thread and a descriptor."""
IDLE_S = 120.0
"""The same for who proved something and then asks for nothing. Askers hang up long before."""
SEND_S = 30.0
"""An asker that takes nothing for so long keeps an array of the store alive, and the next version may need the room."""
LEAVE_S = 1.0
"""For what is still on its way from one that was refused."""
MAX_CONNECTIONS = 256
"""Beyond it the oldest that has proved nothing is hung up on, or the new one where all have: whoever can only connect
keeps nobody out who has a reference."""
ACCEPT_AGAIN_S = 0.1
"""After an accept that failed: with no descriptor left, the next one fails at once as well."""
LONGEST_PIECE_BYTES = 64 << 20
STOP_WITHIN_S = 5.0


class RawServer:
    """Every ask gets one answer. Without the token of a reference no byte of an array leaves; the bytes go in plain."""

    def __init__(self, store: BulkStore, giving: Giving | None = None) -> None:
        """`giving`: how arrays go by collectives or device handles; None: they do not."""
        self._store, self._giving = store, giving
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._unproved: dict[socket.socket, None] = {}
        """Of these, who has proved nothing yet, the oldest first."""
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        """For these three."""
        self.counts: Counter[str] = Counter()
        self.address = ""

    def start(self, host: str, device: str = "") -> str:
        """Listen at any free port of `host`; returns the address, which names the GPU `device` if one is given from."""
        self._listener = listen(host)
        self.address = address_of(host, self._listener.getsockname()[1], device)
        threading.Thread(target=self._accept, args=(self._listener,), name="raw-server", daemon=True).start()
        return self.address

    def statistics(self) -> dict[str, int]:
        return {**self.counts, "connections": len(self._open)}

    def close(self) -> None:
        """Hang up on everybody, within STOP_WITHIN_S."""
        self.address = ""
        if self._listener is None:
            return
        with self._lock:
            listener, self._listener = self._listener, None
            for made in self._open:
                shut(made)
            threads = list(self._threads)
        shut(listener)
        listener.close()
        for thread in threads:
            thread.join(STOP_WITHIN_S)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                made, _ = listener.accept()
            except OSError:
                if self._listener is None:
                    return
                self.counts["not_accepted"] += 1  # Out of descriptors, or it left in the queue.
                time.sleep(ACCEPT_AGAIN_S)
                continue
            with self._lock:
                if self._listener is None or not self._has_room():
                    self.counts["turned_away"] += 1
                    made.close()
                    continue
                thread = threading.Thread(target=self._talk, args=(made,), name="raw-stream", daemon=True)
                self._open.add(made)
                self._unproved[made] = None
                self._threads.add(thread)
            thread.start()

    def _has_room(self) -> bool:
        """With the lock. Hangs up on one that has proved nothing, if it must."""
        if len(self._open) < MAX_CONNECTIONS:
            return True
        if not self._unproved:
            return False
        oldest = next(iter(self._unproved))
        del self._unproved[oldest]
        self._open.discard(oldest)
        shut(oldest)
        self.counts["crowded_out"] += 1
        return True

    def _proved(self, made: socket.socket) -> None:
        with self._lock:
            self._unproved.pop(made, None)

    def _talk(self, made: socket.socket) -> None:
        talk = _Conversation(made, self._store, self._giving, self.counts, partial(self._proved, made))
        try:
            talk.run()
        except CorruptFrame:
            self.counts["malformed"] += 1
        except (OSError, WeightError) as error:
            self.counts["broken"] += 1
            log.info("a raw stream ended: %s", error)
        finally:
            talk.close()
            with self._lock:
                self._open.discard(made)
                self._unproved.pop(made, None)
                self._threads.discard(threading.current_thread())
            made.close()


class _Conversation:
    """One connection; ends at the first ask that is not proved."""

    def __init__(self, made: socket.socket, store: BulkStore, giving: Giving | None, counts: Counter[str],
                 proved: Callable[[], None]) -> None:
        self._socket, self._store, self._counts, self._proved = made, store, counts, proved
        self._turn = None if giving is None else giving.to(made)

    def run(self) -> None:
        set_up(self._socket, FIRST_ASK_S)
        greeting = wire.pack_greeting()
        send(self._socket, greeting)
        challenge = wire.unpack_greeting(greeting)
        while data := receive(self._socket, wire.ASK_BYTES):
            ask, proof = wire.unpack_ask(data)
            self._counts["asks"] += 1
            token = self._store.token(ask.generation)
            if ask.arena != self._store.arena_token:
                self._refuse(ask, "its owner was started anew")
            elif not same(proof, wire.proof(ask, token, challenge)):
                self._refuse(ask, "the asker has no valid reference to it")
                take_leave(self._socket, LEAVE_S)
                return
            else:
                self._proved()
                be_patient(self._socket, SEND_S)
                self._answer(ask, token, challenge)
                be_patient(self._socket, IDLE_S)

    def close(self) -> None:
        if self._turn is not None:
            self._turn.close()

    def _answer(self, ask: wire.Ask, token: bytes, challenge: bytes) -> None:
        with self._store.reading(ask.generation) as found:
            if found is None:
                self._refuse(ask, "the lease ended")
            elif ask.kind in (wire.PLAIN, wire.DIGESTED):
                self._send_piece(ask, found, token, challenge)
            elif self._turn is None:
                self._refuse(ask, "its owner gives it by streams only")
            else:
                self._give(ask, found, token, challenge)

    def _send_piece(self, ask: wire.Ask, found: Any, token: bytes, challenge: bytes) -> None:
        end = ask.first + ask.length
        if not 0 < ask.length <= LONGEST_PIECE_BYTES or end > len(found):
            self._refuse(ask, f"it has no bytes {ask.first} to {end}")
            return
        payload = found[ask.first:end].data
        digested = payload if ask.kind == wire.DIGESTED else b""
        digest = wire.answer_digest(ask, token, challenge, digested)
        self._counts["pieces"] += 1
        self._counts["piece_bytes"] += ask.length
        send(self._socket, wire.pack_answer(ask, wire.YES, ask.length, digest), payload)

    def _give(self, ask: wire.Ask, found: Any, token: bytes, challenge: bytes) -> None:
        assert self._turn is not None
        try:
            text, then = self._turn.prepare(ask, found)
        except GivingRefused as error:
            self._refuse(ask, error.text)
            return
        digest = wire.answer_digest(ask, token, challenge, text)
        send(self._socket, wire.pack_answer(ask, wire.YES, len(text), digest), text)
        then()
        self._counts["given"] += 1

    def _refuse(self, ask: wire.Ask, reason: str) -> None:
        self._counts["refused"] += 1
        text = reason.encode()[: wire.MAX_TEXT_BYTES]
        send(self._socket, wire.pack_answer(ask, wire.NO, len(text), b""), text)
