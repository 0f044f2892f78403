"""What the tracker of the fan-out knows: readers, buckets, and who takes what from whom now. Pure.

Invariant: a reader has at most one wish for a bucket, and none while it fetches it. `Bucket.far`, `hands` and `coming`,
and the sets of a reader, are always what one would count anew from `held`, `fetching` and how readers stand. So a
decision looks at what may have an answer, and not at everything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cosmos_actor.bus.bulk.ref import BulkRef

UPLOADS = 2
"""Readers that one relay serves at a time. One would leave the line idle between two asks; with many at once all get
their bucket late, and nobody can pass it on."""
ACCUSERS = 2
"""Readers, of as many hosts, whose word that a relay has wrong bytes or a wrong key keeps everybody from it. Of one
alone it may be the reader itself that has bad memory or the wrong key, and it would accuse all there are."""


@dataclass(frozen=True)
class Crowd:
    """Who else may want what one reader wants, the publisher's own host left out."""

    readers: int
    hosts: int


@dataclass(eq=False)
class Reader:
    name: str
    host: str
    silent: bool = False
    """Somebody waited for it in vain, and it has not been heard of since."""
    accusers: dict[str, str] = field(default_factory=dict)
    """Whoever had wrong bytes or a wrong key of it -> their host."""
    distrusted: set[str] = field(default_factory=set)
    """Whom it accused itself: it takes from them no more."""
    downloads: int = 0
    first_hand: int = 0
    """Buckets that it was the one to take from the publisher: the others come to it for these."""
    holds: set[bytes] = field(default_factory=set)
    fetches: set[bytes] = field(default_factory=set)

    @property
    def banned(self) -> bool:
        """It serves nobody any more in this life."""
        return len(self.accusers) >= ACCUSERS and len(set(self.accusers.values())) >= ACCUSERS

    @property
    def serves(self) -> bool:
        return not self.silent and not self.banned


@dataclass(eq=False)
class Wish:
    ticket: int
    me: Reader
    bucket: Bucket
    refused: frozenset[str]
    crowd: Crowd


@dataclass
class Fetch:
    source: str
    since: float
    near: bool


@dataclass(eq=False)
class Bucket:
    name: bytes
    nbytes: int
    held: dict[str, BulkRef] = field(default_factory=dict)
    at_host: dict[str, set[str]] = field(default_factory=dict)
    """Host -> who of `held` is there."""
    far: dict[str, None] = field(default_factory=dict)
    """Who of `held` serves other hosts."""
    hands: dict[str, None] = field(default_factory=dict)
    """Who of `far` could serve one more, in the order in which they became free."""
    fetching: dict[str, Fetch] = field(default_factory=dict)
    """Reader -> from whom it takes it now."""
    coming: Counter[str] = field(default_factory=Counter)
    """Host -> how many of `fetching` are there and will serve."""
    wishes: dict[int, Wish] = field(default_factory=dict)
    publisher_failed: bool = False

    @property
    def arena(self) -> bytes:
        return self.name[:16]


class Table:
    """See the module. Its attributes are for reading."""

    def __init__(self) -> None:
        self.readers: dict[str, Reader] = {}
        self.buckets: dict[bytes, Bucket] = {}
        self.wishes: dict[int, Wish] = {}
        self.under_way: dict[tuple[str, bytes], float] = {}
        """Reader and bucket -> since when, the oldest first."""
        self.uploads: Counter[str | bytes] = Counter()
        """By relay, or by the publisher's arena."""

    # ---- readers

    def reader(self, name: str, host: str) -> Reader:
        return self.readers.setdefault(name, Reader(name, host))

    def forget(self, me: Reader) -> None:
        """It holds and fetches nothing any more."""
        del self.readers[me.name]
        for other in self.readers.values():
            other.distrusted.discard(me.name)

    def set_silent(self, me: Reader, silent: bool) -> None:
        served, me.silent = me.serves, silent
        self._stands(me, served)

    def accuse(self, relay: Reader, accuser: Reader) -> None:
        """All lives of an accuser are one."""
        served = relay.serves
        relay.accusers[accuser.name.partition("/")[0]] = accuser.host
        self._stands(relay, served)

    def _stands(self, me: Reader, served: bool) -> None:
        """`served`: whether it did before."""
        if me.serves != served:
            for name in me.fetches:
                self._count_coming(self.buckets[name], me, -1 if served else 1)
            for name in me.holds:
                self._see(self.buckets[name], me)

    # ---- buckets and wishes

    def bucket(self, name: bytes, nbytes: int) -> Bucket:
        return self.buckets.setdefault(name, Bucket(name, nbytes))

    def tidy(self, bucket: Bucket) -> None:
        """A bucket that nobody has or wants is forgotten."""
        if not (bucket.held or bucket.fetching or bucket.wishes):
            self.buckets.pop(bucket.name, None)

    def add_wish(self, wish: Wish) -> None:
        self.wishes[wish.ticket] = wish.bucket.wishes[wish.ticket] = wish

    def remove_wish(self, wish: Wish) -> None:
        del self.wishes[wish.ticket], wish.bucket.wishes[wish.ticket]

    def keep(self, bucket: Bucket, me: Reader, ref: BulkRef) -> None:
        bucket.held[me.name] = ref
        bucket.at_host.setdefault(me.host, set()).add(me.name)
        me.holds.add(bucket.name)
        self._see(bucket, me)

    def let_go(self, bucket: Bucket, me: Reader) -> None:
        if bucket.held.pop(me.name, None) is None:
            return
        me.holds.discard(bucket.name)
        there = bucket.at_host[me.host]
        there.discard(me.name)
        if not there:
            del bucket.at_host[me.host]
        self._see(bucket, me)

    def _see(self, bucket: Bucket, holder: Reader) -> None:
        """What others can have of `holder` now, in `far` and `hands`."""
        name, ref = holder.name, bucket.held.get(holder.name)
        serves = ref is not None and bool(ref.address) and holder.serves
        for there, names in ((serves, bucket.far), (serves and self.uploads[name] < UPLOADS, bucket.hands)):
            if there:
                names.setdefault(name)
            else:
                names.pop(name, None)

    # ---- who takes what from whom

    def begin(self, bucket: Bucket, me: Reader, source: str, now: float, *, near: bool) -> None:
        """`source` empty: the publisher."""
        bucket.fetching[me.name] = Fetch(source, now, near)
        self.under_way[me.name, bucket.name] = now
        me.fetches.add(bucket.name)
        me.downloads += not near
        if me.serves:
            self._count_coming(bucket, me, 1)
        self._count_upload(source or bucket.arena, 1)

    def end(self, bucket: Bucket, me: Reader) -> Fetch | None:
        """None if it takes no such bucket now."""
        fetch = bucket.fetching.pop(me.name, None)
        if fetch is not None:
            del self.under_way[me.name, bucket.name]
            me.fetches.discard(bucket.name)
            me.downloads -= not fetch.near
            if me.serves:
                self._count_coming(bucket, me, -1)
            self._count_upload(fetch.source or bucket.arena, -1)
        return fetch

    @staticmethod
    def _count_coming(bucket: Bucket, me: Reader, more: int) -> None:
        bucket.coming[me.host] += more
        if not bucket.coming[me.host]:
            del bucket.coming[me.host]

    def _count_upload(self, source: str | bytes, more: int) -> None:
        self.uploads[source] += more
        count = self.uploads[source]
        if not count:
            del self.uploads[source]
        relay = self.readers.get(source) if isinstance(source, str) else None
        if relay is not None and count == (UPLOADS if more > 0 else UPLOADS - 1):
            for bucket in map(self.buckets.__getitem__, relay.holds):
                if more > 0:
                    bucket.hands.pop(relay.name, None)
                elif relay.name in bucket.far:
                    bucket.hands[relay.name] = None
