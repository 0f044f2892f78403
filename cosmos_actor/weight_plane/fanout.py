"""A reader of weights that takes buckets from other readers, and passes its own on.

    bring(bucket) -> ask the desk -> from a relay or the publisher -> verified -> kept in the own store; desk is told
                        ^                  |
                        +-- silent, gone, refused, corrupt: that relay is not asked again, at last the publisher is

A relay needs no trust: whatever it sends is verified like the publisher's own bytes. What lies on this host already is
read in place and passed on to nobody: its owner does that.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import numpy as np

from cosmos_actor.bus import Bus, Link
from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.errors import BulkCorrupt, BulkFull, BulkGone, BusError, DeadlineExceeded, PeerRefused
from cosmos_actor.weight_plane.digest import raw
from cosmos_actor.weight_plane.errors import WeightsCorrupt
from cosmos_actor.weight_plane.fanout_messages import (
    CORRUPT,
    GONE,
    PUBLISHER,
    REFUSED,
    SILENT,
    BucketsDropped,
    BucketSource,
    BucketTaken,
    BucketWanted,
    name_of,
)
from cosmos_actor.weight_plane.source import CONCURRENT_BUCKETS, DirectSource, Found, Look

AT_ONCE = 8
"""Buckets asked for at a time: more than are taken at a time, so that the desk can choose which of them comes next."""
HOLDER = "(other readers)"
KEPT_SHARE = 0.5
"""Of the bulk store, for buckets that others may want: experience has to find room there as well."""
AVOIDED_S = 60.0
"""How long a relay is not taken from that could not be reached. Behind a firewall each bucket would else cost the time
to find that out again; one that was only stopped is of use to others meanwhile."""
ANSWER_FACTOR = 2.0
"""Of the patience within which the desk answers, for the answer to come."""


class Store(Protocol):
    """What it needs of a bulk store."""

    def try_put(self, array: Any, *, holder: str, dtype: str = "") -> BulkRef: ...

    def release(self, ref: BulkRef, holder: str) -> bool: ...


class Reader(Protocol):
    """What it needs of a bulk reader."""

    async def fetch(self, ref: BulkRef, *, deadline_s: float, silent_s: float | None = None) -> np.ndarray: ...

    def check(self, ref: BulkRef) -> None: ...

    def is_local(self, ref: BulkRef) -> bool: ...


class Desk(Protocol):
    """Who knows who has what. `ask` raises BusError when nobody answers."""

    async def ask(self, wanted: BucketWanted, deadline_s: float) -> BucketSource: ...

    def tell(self, event: Any) -> None: ...


class DeskUnreachable(BusError):
    """There is no link to a controller now."""


class BusDesk:
    """The desk at the other end of the link to the controller."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._telling: set[asyncio.Task[Any]] = set()

    async def ask(self, wanted: BucketWanted, deadline_s: float) -> BucketSource:
        answer: BucketSource = await self._link().call(wanted, deadline_s=deadline_s)
        return answer

    def tell(self, event: Any) -> None:
        """In the order of the calls. Nobody waits for it: a desk that does not hear it finds out when it asks."""
        task = asyncio.ensure_future(self._emit(event))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _emit(self, event: Any) -> None:
        try:
            await self._link().emit(event)
        except BusError:
            pass  # a controller that is gone has forgotten everything else as well

    def _link(self) -> Link:
        for link in self._bus.links.values():
            if link.role == "controller" and link.up:
                return link
        raise DeskUnreachable("no link to a controller")


class _Refused(Exception):
    """A relay that a bucket could not be had from; `problem` says why."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class FanOutSource:
    """A bucket comes as long as the publisher or any reader that has it can be read, within the deadline.

    A relay from which it does not come costs the patience that the desk allows, once in AVOIDED_S.
    """

    at_once = AT_ONCE

    def __init__(self, reader: Reader, store: Store, desk: Desk, *, patience_s: float, budget_bytes: int) -> None:
        """Keeps at most `KEPT_SHARE` of `budget_bytes`; a desk that does not answer for `patience_s` is gone."""
        self._reader, self._store, self._desk = reader, store, desk
        self._patience_s, self._most_bytes = patience_s, int(budget_bytes * KEPT_SHARE)
        self._direct = DirectSource(reader)
        self._turns = asyncio.Semaphore(CONCURRENT_BUCKETS)
        """For buckets that no desk gives a turn to."""
        self._kept: dict[bytes, BulkRef] = {}
        self._copying_bytes = 0
        self._pulling: set[bytes] = set()
        self._alone_until = float("-inf")
        self._avoided: dict[str, float] = {}
        """Relay -> until when."""
        self._bytes = {"local_bytes": 0, "publisher_bytes": 0, "relay_bytes": 0, "near_bytes": 0}
        self._counts = {"not_kept": 0, "without_desk": 0}
        self._given_up: Counter[str] = Counter()
        self._corrupt: Counter[str] = Counter()

    async def bring(self, ref: BulkRef, look: Look[Found], deadline_s: float) -> Found:
        """See `Source`. Of a relay nothing is raised."""
        until = _now() + deadline_s
        if self._reader.is_local(ref):
            return await self._alone("local_bytes", ref, look, until)
        self._pulling.add(name_of(ref))
        refused: list[str] = []
        problem = ""
        while True:
            source = await self._ask(ref, refused, problem, until)
            problem = ""
            if source is None:
                return await self._alone("publisher_bytes", ref, look, until)
            if not source.ready:
                continue
            try:
                return await self._take(ref, source, look, until)
            except _Refused as error:
                refused.append(source.relay)
                problem = error.problem
                self._given_up[problem] += 1
                self._avoided[source.relay] = _now() + AVOIDED_S

    def whole(self, buckets: list[BulkRef]) -> None:
        """Only these are kept for others from now on."""
        names = {name_of(ref) for ref in buckets}
        self._pulling.clear()
        self._drop([name for name in self._kept if name not in names])

    def statistics(self) -> dict[str, Any]:
        """Bytes by where they came from, relays given up by reason, and whose bytes were wrong."""
        return {**self._bytes, **self._counts, "given_up": dict(self._given_up), "corrupt": dict(self._corrupt),
                "kept_bytes": sum(ref.nbytes for ref in self._kept.values())}

    async def _ask(self, ref: BulkRef, refused: list[str], problem: str, until: float) -> BucketSource | None:
        """The desk's answer; None: there is no desk."""
        if _now() < self._alone_until:
            return None
        left = until - _now()
        if left <= 0:
            raise DeadlineExceeded(f"{ref}: no source of it had a turn in time", peer=ref.owner,
                                   setting="weights.deadline_s")
        self._avoided = {relay: until for relay, until in self._avoided.items() if until > _now()}
        avoided = [relay for relay in self._avoided if relay not in refused]
        wanted = BucketWanted(name_of(ref), ref.nbytes, ref.host_id, avoided + refused, problem)
        try:
            return await self._desk.ask(wanted, min(left, ANSWER_FACTOR * self._patience_s))
        except BusError:
            if _now() >= until:
                raise
            self._counts["without_desk"] += 1
            self._alone_until = _now() + self._patience_s
            return None

    async def _alone(self, kind: str, ref: BulkRef, look: Look[Found], until: float) -> Found:
        async with self._turns:
            found = await self._direct.bring(ref, look, until - _now())
        self._bytes[kind] += ref.nbytes
        return found

    async def _take(self, ref: BulkRef, source: BucketSource, look: Look[Found], until: float) -> Found:
        """From the source that the desk named; the desk hears how that ended, however it does."""
        name = name_of(ref)
        try:
            if source.relay == PUBLISHER:
                bucket, found = await self._direct.bring_both(ref, look, until - _now())
                self._bytes["publisher_bytes"] += ref.nbytes
            else:
                bucket, found = await self._from_relay(ref, source, look, until)
            kept = await self._keep(ref, bucket) if source.keep else None
        except _Refused:
            raise  # the next question says it
        except BaseException as error:
            publisher_failed = source.relay == PUBLISHER and isinstance(error, (BulkGone, PeerRefused))
            self._desk.tell(BucketsDropped([name], publisher_failed))
            raise
        self._desk.tell(BucketTaken(name, kept))
        return found

    async def _from_relay(
        self, ref: BulkRef, source: BucketSource, look: Look[Found], until: float
    ) -> tuple[np.ndarray, Found]:
        """Raises _Refused, or DeadlineExceeded when it is the bucket's own time that is over."""
        there = source.ref
        if there is None or (there.nbytes, there.dtype, there.shape) != (ref.nbytes, ref.dtype, ref.shape):
            raise self._refused(source.relay, CORRUPT)
        try:
            bucket = await self._reader.fetch(there, deadline_s=until - _now(), silent_s=source.silent_s)
            found = await asyncio.get_running_loop().run_in_executor(None, look, raw(bucket))
        except BusError as error:
            if isinstance(error, DeadlineExceeded) and _now() >= until:
                raise
            raise self._refused(source.relay, self._problem(error, there)) from error
        self._bytes["near_bytes" if self._reader.is_local(there) else "relay_bytes"] += ref.nbytes
        return bucket, found

    def _problem(self, error: BusError, there: BulkRef) -> str:
        if isinstance(error, WeightsCorrupt):
            try:
                self._reader.check(there)
            except BulkGone:
                return GONE
        kinds = {WeightsCorrupt: CORRUPT, BulkCorrupt: CORRUPT, PeerRefused: REFUSED, DeadlineExceeded: SILENT}
        return next((problem for kind, problem in kinds.items() if isinstance(error, kind)), GONE)

    def _refused(self, relay: str, problem: str) -> _Refused:
        if problem == CORRUPT:
            self._corrupt[relay] += 1
        return _Refused(problem)

    async def _keep(self, ref: BulkRef, bucket: np.ndarray) -> BulkRef | None:
        """A copy in the own store, where others find it; None without room."""
        if not self._make_room(ref.nbytes):
            self._counts["not_kept"] += 1
            return None
        put = partial(self._store.try_put, bucket, holder=HOLDER, dtype=ref.dtype)
        self._copying_bytes += ref.nbytes
        putting = asyncio.get_running_loop().run_in_executor(None, put)
        try:
            kept = await asyncio.shield(putting)
        except asyncio.CancelledError:
            putting.add_done_callback(self._let_go)
            raise
        except (BulkFull, BulkGone):
            self._counts["not_kept"] += 1
            return None
        finally:
            self._copying_bytes -= ref.nbytes
        self._kept[name_of(ref)] = kept
        return kept

    def _let_go(self, put: asyncio.Future[BulkRef]) -> None:
        """Of what was being copied for a pull that was given up."""
        if not put.cancelled() and put.exception() is None:
            self._store.release(put.result(), HOLDER)

    def _make_room(self, nbytes: int) -> bool:
        """Buckets of older versions go first; those of the version that is being pulled stay."""
        used = sum(ref.nbytes for ref in self._kept.values()) + self._copying_bytes
        stale = [name for name in self._kept if name not in self._pulling]
        while used + nbytes > self._most_bytes and stale:
            used -= self._kept[stale[0]].nbytes
            self._drop([stale.pop(0)])
        return used + nbytes <= self._most_bytes

    def _drop(self, names: Iterable[bytes]) -> None:
        dropped = list(names)
        for name in dropped:
            self._store.release(self._kept.pop(name), HOLDER)
        if dropped:
            self._desk.tell(BucketsDropped(dropped, False))


def _now() -> float:
    return asyncio.get_running_loop().time()
