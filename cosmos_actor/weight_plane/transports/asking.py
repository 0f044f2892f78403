"""What the transports between GPUs share: a thread for each publisher that asks it for buckets.

    event loop ──wish──> thread: asks for several at once, has each brought ──outcome──> event loop

The event loop keeps the deadline. A thread that hangs is left behind, and the process can end with it inside.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from cosmos_actor.bus.bulk.ref import BulkRef, storage_dtype
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.errors import BusError, DeadlineExceeded
from cosmos_actor.weight_plane.transports.interface import TransportLost
from cosmos_actor.weight_plane.transports.outcome import Outcome
from cosmos_actor.weight_plane.transports.raw_connection import RawConnection

if TYPE_CHECKING:
    import torch

CLOSED = "the reader is closed"
CLOSE_WITHIN_S = 2.0
"""For a thread to end: one that is in the midst of something of torch's when the interpreter ends takes it down."""
IDLE_S = 60.0
"""Without work for so long a thread ends, and gives up its connection: the server would hang up later."""
LOOK_S = 1.0
"""Between two looks at a connection that has no work."""


class Wish:
    """A bucket into `target`, or without one a word about it."""

    def __init__(self, ref: BulkRef, target: torch.Tensor | None) -> None:
        self.ref, self.target = ref, target
        self.told = self.ended = False
        self.outcome: Outcome[None] = Outcome()

    def tell(self, error: BusError | None = None) -> None:
        """It is done, or why not."""
        self.told = True
        if error is None:
            self.outcome.bring(None)
        else:
            self.outcome.fail(error)


class Asker(ABC):
    """The thread that asks one publisher. A subclass fulfils wishes; nothing that it raises reaches the thread."""

    thread_name = "asker"
    asked_ahead = 8
    """Wishes that it is given at a time."""

    def __init__(self, address: str, overdue_s: float) -> None:
        self.wishes: queue.SimpleQueue[Wish | None] = queue.SimpleQueue()
        self.asked: set[Wish] = set()
        """Whose outcome is waited for."""
        self.doing = "not begun"
        self._address, self._overdue_s = address, overdue_s
        self._connection: RawConnection | None = None
        self._lock = threading.Lock()
        self._over = False
        self._due = 0
        self.thread = threading.Thread(target=self._run, name=self.thread_name, daemon=True)

    def take_on(self) -> bool:
        """Whether it will do what comes next; False once it has ended."""
        with self._lock:
            self._due += not self._over
            return not self._over

    def leave(self) -> None:
        """End as soon as it can; a wait on a connection that is made ends now."""
        with self._lock:
            self._over = True
        self.wishes.put(None)
        connection = self._connection
        if connection is not None:
            connection.close()

    @abstractmethod
    def fulfil(self, batch: list[Wish]) -> None:
        """Tell each of them how it went; there may be none."""

    def look(self) -> None:  # noqa: B027  (few have anything to look at)
        """There has been no work for LOOK_S."""

    def dial(self) -> RawConnection:
        """A connection to the publisher, which is there from now on."""
        self.doing = f"{self._address} was dialled"
        self._connection = RawConnection(self._address, self._overdue_s)
        if self._over:  # It found no connection to close.
            raise ConnectionError(CLOSED)
        return self._connection

    def drop(self) -> None:
        """Give up the connection, and what hangs on it."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _run(self) -> None:
        while self._round():
            pass
        self.drop()

    def _round(self) -> bool:
        """Nothing of it is kept while the next one is waited for: targets are memory of a whole version."""
        first = self._next()
        if first is None:
            return False
        batch = [first]
        while len(batch) < self.asked_ahead and (more := self._one_more()) is not None:
            batch.append(more)
        self.fulfil([wish for wish in batch if not wish.ended])
        with self._lock:
            self._due -= len(batch)
        return True

    def _next(self) -> Wish | None:
        idle_since = time.monotonic()
        while True:
            try:
                return self.wishes.get(timeout=LOOK_S)
            except queue.Empty:
                self.look()
                if time.monotonic() - idle_since < IDLE_S:
                    continue
                with self._lock:
                    if not self._due:
                        self._over = True
                        return None

    def _one_more(self) -> Wish | None:
        try:
            wish = self.wishes.get_nowait()
        except queue.Empty:
            return None
        if wish is None:
            self.wishes.put(None)
        return wish


class AskingTransport(ABC):
    """See `DeviceTransport` and `Transport`. A fetch ends within its deadline: whole, gone, lost with the publisher, or
    out of time; the next one after a failure begins anew."""

    counted = "taken"
    """What its statistics call the buckets that came."""

    def __init__(self, settings: BulkSettings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.counts: Counter[str] = Counter()
        self._askers: dict[str, Asker] = {}

    @abstractmethod
    def make_asker(self, address: str) -> Asker:
        """For the publisher there; its thread is not started."""

    @abstractmethod
    def late(self, asker: Asker, deadline_s: float) -> str:
        """What became of a bucket that did not come in time, and what is waited for."""

    async def fetch(self, ref: BulkRef, *, deadline_s: float, silent_s: float | None = None) -> np.ndarray:
        """The array in the host's memory. It is one bucket or nothing: the other end is silent if that does not
        come."""
        kind = storage_dtype(ref, self.settings.max_array_bytes)
        taken = await self.fetch_tensor(ref, deadline_s=min(deadline_s, silent_s or deadline_s))
        array: np.ndarray = taken.cpu().numpy().view(kind).reshape(ref.shape)
        array.flags.writeable = False
        return array

    async def fetch_tensor(self, ref: BulkRef, *, deadline_s: float) -> torch.Tensor:
        """[nbytes] uint8 on this end's device."""
        import torch

        storage_dtype(ref, self.settings.max_array_bytes)
        target = torch.empty(ref.nbytes, dtype=torch.uint8, device=self.device)
        await self.fetch_into(ref, target, deadline_s=deadline_s)
        return target

    async def fetch_into(self, ref: BulkRef, target: torch.Tensor, *, deadline_s: float) -> None:
        """See `DeviceTransport.fetch_into`."""
        storage_dtype(ref, self.settings.max_array_bytes)
        await self.ask(ref, target, deadline_s)
        self.counts[self.counted] += 1
        self.counts[f"{self.counted}_bytes"] += ref.nbytes

    def check(self, ref: BulkRef) -> None:  # noqa: B027  (a promise that needs no code)
        """What was taken stays; whether it was still there to be taken, `lives` tells."""

    async def ask(self, ref: BulkRef, target: torch.Tensor | None, deadline_s: float) -> None:
        """Have a wish fulfilled. Raises what the asker told, and DeadlineExceeded."""
        asker = self._askers.get(ref.address)
        if asker is None or not asker.take_on():
            asker = self._askers[ref.address] = self.make_asker(ref.address)
            asker.take_on()
            asker.thread.start()
        wish = Wish(ref, target)
        asker.asked.add(wish)
        asker.wishes.put(wish)
        try:
            if await wish.outcome.wait(deadline_s):
                return wish.outcome.take()
        finally:
            asker.asked.discard(wish)
            wish.ended = True
            wish.outcome.leave()
        self._askers.pop(ref.address, None)
        asker.leave()
        raise DeadlineExceeded(f"{ref} {self.late(asker, deadline_s)}", peer=ref.owner, channel="weights",
                               setting="weights.deadline_s")

    def close(self) -> None:
        """End the threads, and tell who waits; within CLOSE_WITHIN_S."""
        for asker in self._askers.values():
            asker.leave()
        until = time.monotonic() + CLOSE_WITHIN_S
        for asker in self._askers.values():
            asker.thread.join(max(0.0, until - time.monotonic()))
            for wish in tuple(asker.asked):  # The thread may still dial.
                wish.tell(TransportLost(f"{wish.ref} did not come: {CLOSED}", peer=wish.ref.owner, channel="weights"))
        self._askers.clear()
