"""The taker's side of a collective of two, as a transport. Imports torch.

One daemon thread for each publisher makes the group, takes part in the broadcasts one after the other, and is left
behind if it ever hangs: the event loop keeps the deadline, and the process can end with the thread inside.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import torch

from cosmos_actor.bus.bulk.ref import BulkRef, storage_dtype
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.errors import BulkGone, BusError, CorruptFrame, DeadlineExceeded
from cosmos_actor.weight_plane.transports import raw_wire as wire
from cosmos_actor.weight_plane.transports.interface import TransportLost
from cosmos_actor.weight_plane.transports.outcome import Outcome
from cosmos_actor.weight_plane.transports.pair import BACKENDS, PairGroup, gone, take_part
from cosmos_actor.weight_plane.transports.raw_connection import RawConnection

PIECE_BYTES = 256 << 20
"""Of one broadcast: between two GPUs as quick as one of gigabytes, and who is silent is noticed within a bucket."""
ASKED_AHEAD = 8
"""Buckets asked for at a time: between two GPUs a bucket takes less than a question and its answer."""
CLOSE_WITHIN_S = 2.0
"""For a thread to end: one that is in the midst of something of torch's when the interpreter ends takes it down."""
IDLE_S = 60.0
"""A pair without work for so long is given up: the next version makes another."""


class PairTransport:
    """A fetch ends within its deadline: whole, gone, lost with the other member, or out of time.

    After a failure the next fetch makes a new group: one lost member costs its own fetches and nobody else's.
    """

    def __init__(self, settings: BulkSettings, backend: str = "nccl", device: str = "cpu") -> None:
        self.settings, self.backend, self.device = settings, backend, torch.device(device)
        self._members: dict[str, _Member] = {}
        self.counts: Counter[str] = Counter()

    async def fetch(self, ref: BulkRef, *, deadline_s: float, silent_s: float | None = None) -> np.ndarray:
        """The array in the host's memory. A group is one bucket or nothing: it is silent if that does not come."""
        kind = storage_dtype(ref)
        taken = await self.fetch_tensor(ref, deadline_s=min(deadline_s, silent_s or deadline_s))
        array: np.ndarray = taken.cpu().numpy().view(kind).reshape(ref.shape)
        array.flags.writeable = False
        return array

    async def fetch_tensor(self, ref: BulkRef, *, deadline_s: float) -> torch.Tensor:
        """[nbytes] uint8 on this end's device."""
        target = torch.empty(ref.nbytes, dtype=torch.uint8, device=self.device)
        await self.fetch_into(ref, target, deadline_s=deadline_s)
        return target

    async def fetch_into(self, ref: BulkRef, target: torch.Tensor, *, deadline_s: float) -> None:
        """See `DeviceTransport.fetch_into`."""
        storage_dtype(ref, self.settings.max_array_bytes)
        member = self._members.get(ref.address)
        if member is None or not member.take_on():
            member = self._members[ref.address] = _Member(self, ref.address)
            member.take_on()
        wish = _Wish(ref, target)
        member.wishes.put(wish)
        try:
            if await wish.outcome.wait(deadline_s):
                self.counts["taken"] += 1
                self.counts["taken_bytes"] += ref.nbytes
                return wish.outcome.take()
        finally:
            wish.ended = True
            wish.outcome.leave()
        self._members.pop(ref.address, None)
        member.leave()
        raise DeadlineExceeded(f"{ref} did not come by {self.backend} within {deadline_s:g} s: the other member of"
                               f" the group is silent ({member.doing})", peer=ref.owner, channel="weights",
                               setting="weights.deadline_s")

    async def lives(self, ref: BulkRef, *, deadline_s: float) -> None:
        """What was given was not freed meanwhile: the giver holds it until it is out."""

    def check(self, ref: BulkRef) -> None:
        """What was taken stays."""

    def statistics(self) -> dict[str, Any]:
        return {**self.counts, "members": len(self._members)}

    def close(self) -> None:
        for member in self._members.values():
            member.leave()
        until = time.monotonic() + CLOSE_WITHIN_S
        for member in self._members.values():
            member.thread.join(max(0.0, until - time.monotonic()))
        self._members.clear()


class _Wish:
    def __init__(self, ref: BulkRef, target: torch.Tensor) -> None:
        self.ref, self.target = ref, target
        self.ended = False
        self.outcome: Outcome[None] = Outcome()


class _Member:
    """The thread that is this end's member of the group with one publisher."""

    def __init__(self, transport: PairTransport, address: str) -> None:
        self.wishes: queue.SimpleQueue[_Wish | None] = queue.SimpleQueue()
        self.doing = "not begun"
        self._transport, self._address = transport, address
        self._connection: RawConnection | None = None
        self._group: PairGroup | None = None
        self._lock = threading.Lock()
        self._over = False
        self._due = 0
        self.thread = threading.Thread(target=self._run, name="pair-member", daemon=True)
        self.thread.start()

    def take_on(self) -> bool:
        """Whether it will do what comes next; False once it has ended."""
        with self._lock:
            self._due += not self._over
            return not self._over

    def leave(self) -> None:
        """End as soon as it can; a wait on the connection ends now."""
        with self._lock:
            self._over = True
        self.wishes.put(None)
        connection = self._connection
        if connection is not None:
            connection.close()

    def _run(self) -> None:
        while (first := self._next()) is not None:
            batch = [first]
            while len(batch) < ASKED_AHEAD and (more := self._one_more()) is not None:
                batch.append(more)
            self._fulfil([wish for wish in batch if not wish.ended])
            with self._lock:
                self._due -= len(batch)
        self._drop()

    def _fulfil(self, batch: list[_Wish]) -> None:
        """All of them are asked for at once, so that the giver goes from one to the next without a word from here."""
        try:
            if batch:
                self._take(batch)
        except BulkGone as error:  # of the group itself
            problem: BusError = error
        except (OSError, CorruptFrame, TransportLost) as error:
            said = error.text if isinstance(error, BusError) else str(error) or type(error).__name__
            problem = TransportLost(f"did not come by {self._transport.backend} while {self.doing}: {said}")
        except Exception as error:  # The outermost loop of this thread: whoever waits is told instead of hanging.
            problem = TransportLost(f"did not come: {self._transport.backend} failed: {error!r}")
        else:
            return
        self._drop()
        for wish in batch:
            wish.outcome.fail(type(problem)(f"{wish.ref} {problem.text}", peer=wish.ref.owner, channel="weights"))

    def _next(self) -> _Wish | None:
        while True:
            try:
                return self.wishes.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not self._due:
                        self._over = True
                        return None

    def _one_more(self) -> _Wish | None:
        try:
            wish = self.wishes.get_nowait()
        except queue.Empty:
            return None
        if wish is None:
            self.wishes.put(None)
        return wish

    def _take(self, batch: list[_Wish]) -> None:
        if self._group is None:
            self._meet(batch[0].ref)
        connection, group = self._connection, self._group
        assert connection is not None and group is not None
        self.doing = "the publisher was asked for it"
        asks = [connection.ask(wire.PAIRED, wish.ref, PIECE_BYTES, wish.ref.nbytes) for wish in batch]
        for wish, ask in zip(batch, asks, strict=True):
            ref = wish.ref
            self.doing = "the publisher was asked for it"
            try:
                connection.text(ask, ref)
            except BulkGone as error:
                wish.outcome.fail(error)
                continue
            self.doing = "it was being broadcast"
            silent_s = self._transport.settings.overdue_s
            group.broadcast(wish.target, lambda: gone(connection.socket), silent_s, PIECE_BYTES)
            wish.outcome.bring(None)

    def _meet(self, ref: BulkRef) -> None:
        self.doing = f"{self._address} was dialled"
        self._connection = connection = RawConnection(self._address, self._transport.settings.overdue_s)
        self.doing = "the group of two was being made"
        backend = self._transport.backend
        meeting = connection.text(connection.ask(wire.PAIR, ref, BACKENDS.index(backend), 0), ref)
        self._group = take_part(backend, meeting, connection.socket, self._transport.device)
        self._transport.counts["groups"] += 1

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._group is not None:
            self._group.close()
        self._connection = self._group = None
