"""Serves one store to readers on other hosts, from a thread and sockets of its own.

Control traffic never waits behind bulk: nothing here touches the bus's sockets, its event loop or its I/O thread.
"""

from __future__ import annotations

import threading
from typing import Any, Dict, List, Optional

import zmq

from ..errors import BusError, CorruptFrame
from ..keys import KeyRing
from ..socket import bind, make_bulk_router, make_context, make_zap
from ..zap import Doorkeeper
from .store import BulkStore
from .waker import Waker
from .wire import MAX_ASK_BYTES, Ask, digest, pack_chunk, pack_no, same, unpack_ask

STOP_WITHIN_S = 5.0
# The thread looks up between two chunks; one that does not is stuck in the kernel, and the close goes on without it.
LONGEST_CHUNK_BYTES = 16 << 20
LONGEST_POLL_MS = 1000


class BulkServer:
    """An ask gets one answer: the chunk, or a No with its reason. Without the reference's token no byte leaves."""

    def __init__(self, store: BulkStore, keys: Optional[KeyRing] = None) -> None:
        """With `keys` only the roles on their list may connect, encrypted; see `BulkSettings.encrypt`."""
        self._store = store
        self._keys = keys if store.settings.encrypt else None
        self._closing = False
        self._thread: Optional[threading.Thread] = None
        self._counts = {"asks": 0, "chunks": 0, "chunk_bytes": 0, "refused": 0, "damaged_asks": 0, "unsent": 0}

    def start(self, listen: str) -> str:
        """Listen at `tcp://HOST:PORT` (0: any); returns the address, which later references of the store carry."""
        self._context = make_context()
        self._door = None if self._keys is None else Doorkeeper(make_zap(self._context), self._keys)
        self._router = make_bulk_router(self._context, self._keys, MAX_ASK_BYTES)
        try:
            self._store.address = bind(self._router, listen)
        except BusError:
            self._close_sockets()
            raise
        self._wake = Waker()
        self._thread = threading.Thread(target=self._run, name="bulk-server", daemon=True)
        self._thread.start()
        return self._store.address

    def close(self) -> None:
        """Stop answering, within STOP_WITHIN_S."""
        self._store.address = ""
        self._closing = True
        if self._thread is not None:
            self._wake.set()
            self._thread.join(STOP_WITHIN_S)

    def statistics(self) -> Dict[str, int]:
        return dict(self._counts)

    def answer(self, frames: List[Any]) -> List[Any]:
        """The frames to send back for the frames of one ask. Raises CorruptFrame for what is no ask."""
        ask, proof = unpack_ask(frames)
        self._counts["asks"] += 1
        token = self._store.token(ask.generation)
        if ask.arena != self._store.arena_token:
            return self._refuse(ask, "its owner was started anew")
        if not same(proof, digest(ask, token, b"ask")):
            return self._refuse(ask, "the asker has no valid reference to it")
        with self._store.reading(ask.generation) as found:
            if found is None:
                return self._refuse(ask, "the lease ended")
            end = ask.first + ask.length
            if not 0 < ask.length <= LONGEST_CHUNK_BYTES or end > len(found):
                return self._refuse(ask, f"it has no bytes {ask.first} to {end}")
            payload = found[ask.first:end].tobytes()
        self._counts["chunks"] += 1
        self._counts["chunk_bytes"] += ask.length
        return pack_chunk(ask, payload, token)

    def _refuse(self, ask: Ask, reason: str) -> List[Any]:
        self._counts["refused"] += 1
        return pack_no(ask, reason)

    def _run(self) -> None:
        door = None if self._door is None else self._door.socket
        mine = [readable for readable in (self._router, door, self._wake.fd) if readable is not None]
        poller = zmq.Poller()
        for readable in mine:
            poller.register(readable, zmq.POLLIN)
        while not self._closing:
            poller.poll(LONGEST_POLL_MS)
            if self._door is not None:
                self._door.on_readable()
            self._answer_one()
        self._close_sockets()
        self._wake.close()

    def _close_sockets(self) -> None:
        self._router.close(0)
        if self._door is not None:
            self._door.socket.close(0)
        self._context.term()

    def _answer_one(self) -> None:
        try:
            peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        try:
            self._send([peer, *self.answer(frames)])
        except CorruptFrame:
            self._counts["damaged_asks"] += 1

    def _send(self, frames: List[Any]) -> None:
        """An answer that finds no room is let go: the asker, whose credit it was, asks again when it is overdue."""
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._counts["unsent"] += 1
