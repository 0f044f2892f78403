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
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.weight_plane.fanout_messages import CORRUPT, PUBLISHER, REFUSED
from cosmos_actor.weight_plane.fanout_table import Bucket, Crowd, Reader, Table, Wish

DOWNLOADS = 4
"""Buckets that one reader takes over the network at a time, as without relays."""
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


class Tracker:
    """See the module. `decide` is called after each of the others and when `next_event` has come."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._slowest_s = 0.0
        self._table = Table()
        self._tickets = itertools.count()
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
        """A ticket, for the answer that `decide` will give; none is given to an earlier question for the same bucket.
        `problem` is with the last of `refused`."""
        me, wanted = self._heard(reader, host), self._table.bucket(bucket, nbytes)
        fetch = self._table.end(wanted, me)
        for wish in [wish for wish in wanted.wishes.values() if wish.me is me]:
            self._table.remove_wish(wish)
        if problem and refused:
            self._note_problem(me, refused[-1], problem, named=fetch is not None and fetch.source == refused[-1])
        ticket = next(self._tickets)
        self._table.add_wish(Wish(ticket, me, wanted, frozenset(refused) | me.distrusted, crowd))
        return ticket

    def withdraw(self, ticket: int) -> None:
        """Whoever asked does not wait for the answer any more."""
        wish = self._table.wishes.get(ticket)
        if wish is not None:
            self._table.remove_wish(wish)
            self._table.tidy(wish.bucket)

    def taken(self, reader: str, host: str, bucket: bytes, ref: BulkRef | None, now: float) -> None:
        """It has the bucket, verified, and keeps it at `ref` for others."""
        me, known = self._heard(reader, host), self._table.buckets.get(bucket)
        fetch = None if known is None else self._table.end(known, me)
        if known is not None and fetch is not None:
            kind = "near_bytes" if fetch.near else "publisher_bytes" if fetch.source == PUBLISHER else "relay_bytes"
            self._bytes[kind] += known.nbytes
            self._slowest_s = max(now - fetch.since, SLOWNESS_FADES * self._slowest_s)
        if ref is not None:
            self._table.keep(self._table.bucket(bucket, ref.nbytes), me, ref)
        elif known is not None:
            self._table.tidy(known)

    def dropped(self, reader: str, buckets: list[bytes], *, publisher_failed: bool = False) -> None:
        """It has let go of these, or does not take them any more."""
        me = self._table.readers.get(reader)
        for bucket in [self._table.buckets[name] for name in buckets if name in self._table.buckets]:
            if me is not None:
                self._table.end(bucket, me)
                self._table.let_go(bucket, me)
            if publisher_failed:
                self._note_failed(bucket.arena)
            self._table.tidy(bucket)

    def left(self, reader: str) -> None:
        """This life of the reader is over."""
        for ticket in [ticket for ticket, wish in self._table.wishes.items() if wish.me.name == reader]:
            self.withdraw(ticket)
        me = self._table.readers.get(reader)
        if me is not None:
            self.dropped(reader, [*me.holds | me.fetches])
            self._table.forget(me)

    def is_banned(self, reader: str) -> bool:
        """Whether it is named to nobody any more."""
        known = self._table.readers.get(reader)
        return known is not None and known.banned

    # ---- what follows

    def decide(self, now: float) -> list[Grant]:
        """Everything that can be answered now."""
        self._give_up_overdue(now)
        grants: list[Grant] = []
        order = [(self._turn(wish), wish) for wish in self._candidates()]
        heapify(order)
        while order:
            before, wish = heappop(order)
            turn = self._turn(wish)
            if turn != before:  # it has been granted something else meanwhile
                heappush(order, (turn, wish))
                continue
            source = self._source(wish)  # None now is None after further grants: they only take hands away
            if source is not None:
                grants.append(self._grant(wish, source, now))
                order = [(turn, wish) for turn, wish in order if self._may_have(wish, self._hope(wish.bucket))]
                heapify(order)
        return grants

    def next_event(self, now: float) -> float | None:
        """When `decide` has something to do even if nobody says anything; None while nobody waits."""
        since = next(iter(self._table.under_way.values()), None)
        return None if since is None or not self._table.wishes else since + OVERDUE_FACTOR * self.silent_s

    def statistics(self) -> dict[str, Any]:
        """Bytes by where readers took them, why sources were given up, and whose bytes were wrong."""
        return {**self._bytes, "problems": dict(self._problems), "corrupt": dict(self._corrupt),
                "readers": len(self._table.readers), "waiting": len(self._table.wishes)}

    def _candidates(self) -> Iterator[Wish]:
        """The wishes for which there may be a source: of the others `_source` would say that there is none."""
        for bucket in self._table.buckets.values():
            if bucket.wishes:
                hope = self._hope(bucket)
                for wish in bucket.wishes.values():
                    if self._may_have(wish, hope):
                        yield wish

    def _hope(self, bucket: Bucket) -> bool:
        """Whether somebody could send it over the network now to whoever refuses nobody."""
        if bucket.hands or bucket.far:
            return bool(bucket.hands)
        return bucket.publisher_failed or not bucket.coming and self._table.uploads[bucket.arena] < DOWNLOADS

    @staticmethod
    def _may_have(wish: Wish, hope: bool) -> bool:
        me, bucket = wish.me, wish.bucket
        return bool(hope and me.downloads < DOWNLOADS and me.host not in bucket.coming or wish.refused
                    or me.host in bucket.at_host)

    @staticmethod
    def _turn(wish: Wish) -> tuple[int, int, int, int]:
        """Who takes the least now comes first, with the bucket that the fewest have; and the publisher's buckets go to
        many readers. In order of the buckets instead, 24 readers took two and a half times as long."""
        me, bucket = wish.me, wish.bucket
        return me.downloads, len(bucket.held) + len(bucket.fetching), me.first_hand, wish.ticket

    def _source(self, wish: Wish) -> str | None:
        """From whom to take it now; None: later."""
        bucket, me = wish.bucket, wish.me
        near = [name for name in bucket.at_host.get(me.host, ()) if self._may_serve(name, wish)]
        if near:
            return min(near, key=lambda name: (self._table.uploads[name], name))
        if me.downloads >= DOWNLOADS or me.host in (coming := self._coming(wish)):
            return None  # the latter: it is on its way to this host
        far = [name for name in bucket.hands if self._may_serve(name, wish)]
        if far:
            return min(far, key=self._table.uploads.__getitem__)
        if any(self._may_serve(name, wish) for name in bucket.far):
            return None
        if bucket.publisher_failed:
            return PUBLISHER  # which will be gone for this one too: better at once than one after the other
        most = PUBLISHER_UPLOADS if wish.crowd.hosts > 1 else DOWNLOADS
        return PUBLISHER if not coming and self._table.uploads[bucket.arena] < most else None

    def _coming(self, wish: Wish) -> Collection[str]:
        """The hosts at which readers take it now that would serve this one."""
        bucket = wish.bucket
        if not wish.refused:
            return bucket.coming
        return {self._table.readers[name].host for name in bucket.fetching if self._may_serve(name, wish)}

    def _may_serve(self, relay: str, wish: Wish) -> bool:
        return relay not in wish.refused and relay != wish.me.name and self._table.readers[relay].serves

    def _grant(self, wish: Wish, source: str, now: float) -> Grant:
        bucket, me = wish.bucket, wish.me
        near = source != PUBLISHER and self._table.readers[source].host == me.host
        self._table.remove_wish(wish)
        self._table.begin(bucket, me, source, now, near=near)
        me.first_hand += source == PUBLISHER
        keep = wish.crowd.readers > 1 and not near
        return Grant(wish.ticket, source, bucket.held.get(source), keep)

    def _give_up_overdue(self, now: float) -> None:
        allowed, table = OVERDUE_FACTOR * self.silent_s, self._table
        for (reader, name), _ in list(itertools.takewhile(
                lambda fetch: now - fetch[1] >= allowed, table.under_way.items())):
            table.end(table.buckets[name], table.readers[reader])
            table.set_silent(table.readers[reader], True)
            self._problems["overdue"] += 1

    def _note_problem(self, me: Reader, relay: str, problem: str, *, named: bool) -> None:
        """`named`: it was to take it from that relay now. Otherwise its word keeps nobody else from the relay."""
        self._problems[problem] += 1
        known = self._table.readers.get(relay)
        if known is None:
            return
        if problem not in (CORRUPT, REFUSED):
            self._table.set_silent(known, True)
            return
        me.distrusted.add(relay)
        if problem == CORRUPT:
            self._corrupt[relay] += 1
        if named:
            self._table.accuse(known, me)

    def _note_failed(self, arena: bytes) -> None:
        for bucket in self._table.buckets.values():
            bucket.publisher_failed |= bucket.arena == arena

    def _heard(self, reader: str, host: str) -> Reader:
        me = self._table.reader(reader, host)
        self._table.set_silent(me, False)
        return me
