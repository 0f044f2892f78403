"""Who takes which bucket from whom. Pure: what readers say and the time come in, decisions go out.

    wanted --decide--> fetching --taken--> held (a source for others) --dropped, left--> gone
       ^                  |
       +-- given up: that source is not named again to this reader

A bucket leaves the publisher once, to one reader; the others get it from who has it: on their own host first, out of
shared memory, else from the reader that has the fewest others to serve. So the publisher sends about one copy and each
reader receives one and sends about one, all at the same time.

Invariant: who wants a bucket is named a source within a bounded time, whatever the others do. Who holds nobody up
any more (it left, is overdue, or was given up by somebody) is not waited for, and the publisher is always left.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.weight_plane.fanout_messages import CORRUPT, PUBLISHER, REFUSED

DOWNLOADS = 4
"""Buckets that one reader takes over the network at a time, as without relays."""
UPLOADS = 2
"""Readers that one relay serves at a time. One would leave the line idle between two asks; with many at once all get
their bucket late, and nobody can pass it on."""
PUBLISHER_UPLOADS = 2
"""The same for the publisher, when there are readers to pass on what it sends."""
OVERDUE_FACTOR = 1.5
"""Of the silence that is allowed: then the reader itself has noticed and asked for another source, if it lives."""
SLOWNESS_FACTOR = 3.0
"""On a slow network the allowed silence is this many times what the slowest bucket of late took, or readers would give
up sources that are only slow and load the publisher with a copy each."""
SLOWNESS_FADES = 0.95
"""With each bucket that was taken: a line that has become quick again gets the short patience back."""


@dataclass(frozen=True)
class Grant:
    """The answer to one question: take the bucket from `relay`, at `ref`."""

    ticket: int
    relay: str
    ref: BulkRef | None
    keep: bool


@dataclass(frozen=True)
class Crowd:
    """Who else may want what one reader wants, the publisher's own host left out."""

    readers: int
    hosts: int


@dataclass(order=True)
class _Wish:
    ticket: int
    reader: str
    bucket: bytes
    refused: frozenset[str]
    crowd: Crowd


@dataclass
class _Fetch:
    source: str
    since: float
    nbytes: int
    near: bool


@dataclass
class _Bucket:
    nbytes: int
    held: dict[str, BulkRef] = field(default_factory=dict)
    fetching: dict[str, _Fetch] = field(default_factory=dict)
    """Reader -> from whom it takes it now."""
    publisher_failed: bool = False
    at_host: dict[str, set[str]] = field(default_factory=dict)
    """Host -> who of `held` is there."""

    def keep(self, reader: str, host: str, ref: BulkRef) -> None:
        self.held[reader] = ref
        self.at_host.setdefault(host, set()).add(reader)

    def let_go(self, reader: str) -> None:
        if self.held.pop(reader, None) is not None:
            for readers in self.at_host.values():
                readers.discard(reader)


@dataclass
class _Reader:
    host: str
    silent: bool = False
    """Somebody waited for it in vain, and it has not been heard of since."""
    banned: bool = False
    """Its bytes were wrong, or its key is: it serves nobody any more in this life."""
    downloads: int = 0
    first_hand: int = 0
    """Buckets that it was the one to take from the publisher: the others come to it for these."""


class Tracker:
    """See the module. `decide` is called after each of the others and when `next_event` has come."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._slowest_s = 0.0
        self._readers: dict[str, _Reader] = {}
        self._buckets: dict[bytes, _Bucket] = {}
        self._wishes: dict[int, _Wish] = {}
        self._tickets = itertools.count()
        self._uploads: Counter[str | bytes] = Counter()
        """By relay, or by the publisher's arena."""
        self._free: set[str] = set()
        """Readers that could serve one more."""
        self._bytes = {"publisher_bytes": 0, "relay_bytes": 0, "near_bytes": 0}
        self._problems: Counter[str] = Counter()
        self._corrupt: Counter[str] = Counter()

    @property
    def silent_s(self) -> float:
        """How long a source may be silent now."""
        return max(self._patience_s, SLOWNESS_FACTOR * self._slowest_s)

    # ---- what readers say

    def want(self, reader: str, host: str, bucket: bytes, nbytes: int, *, crowd: Crowd, refused: list[str],
             problem: str) -> int:
        """A ticket, for the answer that `decide` will give. `problem` is with the last of `refused`."""
        self._heard(reader, host)
        self._end_fetch(reader, bucket)
        if problem and refused:
            self._note_problem(refused[-1], problem)
        self._buckets.setdefault(bucket, _Bucket(nbytes))
        ticket = next(self._tickets)
        self._wishes[ticket] = _Wish(ticket, reader, bucket, frozenset(refused), crowd)
        return ticket

    def withdraw(self, ticket: int) -> None:
        """Whoever asked does not wait for the answer any more."""
        wish = self._wishes.pop(ticket, None)
        if wish is not None:
            self._tidy(wish.bucket)

    def taken(self, reader: str, host: str, bucket: bytes, ref: BulkRef | None, now: float) -> None:
        """It has the bucket, verified, and keeps it at `ref` for others."""
        self._heard(reader, host)
        fetch = self._end_fetch(reader, bucket)
        if fetch is not None:
            kind = "near_bytes" if fetch.near else "publisher_bytes" if fetch.source == PUBLISHER else "relay_bytes"
            self._bytes[kind] += fetch.nbytes
            self._slowest_s = max(now - fetch.since, SLOWNESS_FADES * self._slowest_s)
        if ref is not None:
            self._buckets.setdefault(bucket, _Bucket(ref.nbytes)).keep(reader, host, ref)
        self._tidy(bucket)

    def dropped(self, reader: str, buckets: list[bytes], *, publisher_failed: bool = False) -> None:
        """It has let go of these, or does not take them any more."""
        for bucket in buckets:
            self._end_fetch(reader, bucket)
            if bucket in self._buckets:
                self._buckets[bucket].let_go(reader)
                if publisher_failed:
                    self._note_failed(_arena(bucket))
                self._tidy(bucket)

    def left(self, reader: str) -> None:
        """This life of the reader is over."""
        self._readers.pop(reader, None)
        self._free.discard(reader)
        for ticket in [ticket for ticket, wish in self._wishes.items() if wish.reader == reader]:
            del self._wishes[ticket]
        self.dropped(reader, list(self._buckets))

    # ---- what follows

    def decide(self, now: float) -> list[Grant]:
        """Everything that can be answered now."""
        self._give_up_overdue(now)
        grants: list[Grant] = []
        order = [(self._turn(wish), wish) for wish in self._wishes.values()]
        heapify(order)
        while order:
            turn, wish = heappop(order)
            if turn != self._turn(wish):  # it has been granted something else meanwhile
                heappush(order, (self._turn(wish), wish))
                continue
            source = self._source(wish)  # None now is None after further grants: they only take hands away
            if source is not None:
                grants.append(self._grant(wish, source, now))
        return grants

    def next_event(self, now: float) -> float | None:
        """When `decide` has something to do even if nobody says anything; None while nobody waits."""
        if not self._wishes:
            return None
        since = [fetch.since for bucket in self._buckets.values() for fetch in bucket.fetching.values()]
        return min(since) + OVERDUE_FACTOR * self.silent_s if since else None

    def statistics(self) -> dict[str, Any]:
        """Bytes by where readers took them, why sources were given up, and whose bytes were wrong."""
        return {**self._bytes, "problems": dict(self._problems), "corrupt": dict(self._corrupt),
                "readers": len(self._readers), "waiting": len(self._wishes)}

    def _turn(self, wish: _Wish) -> tuple[int, int, int, int]:
        """Who takes the least now comes first, with the bucket that the fewest have; and the publisher's buckets go to
        many readers. In order of the buckets instead, 24 readers took two and a half times as long."""
        me, bucket = self._readers[wish.reader], self._buckets[wish.bucket]
        return me.downloads, len(bucket.held) + len(bucket.fetching), me.first_hand, wish.ticket

    def _source(self, wish: _Wish) -> str | None:
        """From whom to take it now; None: later."""
        bucket, me = self._buckets[wish.bucket], self._readers[wish.reader]
        near = [name for name in bucket.at_host.get(me.host, ()) if self._may_serve(name, wish)]
        if near:
            return min(near, key=self._uploads.__getitem__)
        others = [name for name in bucket.fetching if self._may_serve(name, wish)]
        if me.downloads >= DOWNLOADS or any(self._readers[name].host == me.host for name in others):
            return None  # the latter: it is on its way to this host
        free, held = sorted((self._free, bucket.held), key=len)
        far = [name for name in free if name in held and bucket.held[name].address and self._may_serve(name, wish)]
        if far:
            return min(far, key=self._uploads.__getitem__)
        if any(ref.address and self._may_serve(name, wish) for name, ref in bucket.held.items()):
            return None
        if bucket.publisher_failed:
            return PUBLISHER  # which will be gone for this one too: better at once than one after the other
        most = PUBLISHER_UPLOADS if wish.crowd.hosts > 1 else DOWNLOADS
        return PUBLISHER if not others and self._uploads[_arena(wish.bucket)] < most else None

    def _may_serve(self, relay: str, wish: _Wish) -> bool:
        known = self._readers.get(relay)
        return known is not None and relay not in wish.refused and relay != wish.reader and not (
            known.silent or known.banned)

    def _grant(self, wish: _Wish, source: str, now: float) -> Grant:
        bucket, me = self._buckets[wish.bucket], self._readers[wish.reader]
        near = source != PUBLISHER and self._readers[source].host == me.host
        del self._wishes[wish.ticket]
        self._end_fetch(wish.reader, wish.bucket)
        bucket.fetching[wish.reader] = _Fetch(source, now, bucket.nbytes, near)
        self._count_upload(source or _arena(wish.bucket), 1)
        me.downloads += not near
        me.first_hand += source == PUBLISHER
        keep = wish.crowd.readers > 1 and not near
        return Grant(wish.ticket, source, bucket.held.get(source), keep)

    def _end_fetch(self, reader: str, name: bytes) -> _Fetch | None:
        bucket = self._buckets.get(name)
        fetch = None if bucket is None else bucket.fetching.pop(reader, None)
        if fetch is not None:
            self._count_upload(fetch.source or _arena(name), -1)
            if reader in self._readers:
                self._readers[reader].downloads -= not fetch.near
        return fetch

    def _count_upload(self, source: str | bytes, more: int) -> None:
        self._uploads[source] += more
        count = self._uploads[source]
        if not count:
            del self._uploads[source]
        if isinstance(source, str) and source in self._readers:
            (self._free.add if count < UPLOADS else self._free.discard)(source)

    def _give_up_overdue(self, now: float) -> None:
        allowed = OVERDUE_FACTOR * self.silent_s
        for name, bucket in self._buckets.items():
            for reader in [reader for reader, fetch in bucket.fetching.items() if now - fetch.since >= allowed]:
                self._end_fetch(reader, name)
                self._readers[reader].silent = True
                self._problems["overdue"] += 1

    def _note_problem(self, relay: str, problem: str) -> None:
        self._problems[problem] += 1
        known = self._readers.get(relay)
        if known is None:
            return
        if problem in (CORRUPT, REFUSED):
            known.banned = True
            if problem == CORRUPT:
                self._corrupt[relay] += 1
        else:
            known.silent = True

    def _note_failed(self, arena: bytes) -> None:
        for name, bucket in self._buckets.items():
            bucket.publisher_failed |= _arena(name) == arena

    def _heard(self, reader: str, host: str) -> None:
        if reader not in self._readers:
            self._readers[reader] = _Reader(host)
            self._free.add(reader)
        self._readers[reader].silent = False

    def _tidy(self, name: bytes) -> None:
        """A bucket that nobody has or wants is forgotten."""
        bucket = self._buckets.get(name)
        if bucket is None or bucket.held or bucket.fetching:
            return
        if any(wish.bucket == name for wish in self._wishes.values()):
            return
        del self._buckets[name]


def _arena(bucket: bytes) -> bytes:
    return bucket[:16]
