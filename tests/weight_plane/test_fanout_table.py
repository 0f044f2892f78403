"""The fan-out's indices: what is decided by them is what would be decided by looking at everything."""

from __future__ import annotations

import random

import pytest

from cosmos_actor.weight_plane.fanout_messages import CORRUPT, GONE, PUBLISHER, REFUSED, SILENT
from cosmos_actor.weight_plane.fanout_table import UPLOADS, Bucket, Crowd, Wish
from cosmos_actor.weight_plane.fanout_tracker import DOWNLOADS, PUBLISHER_UPLOADS, Tracker
from tests.weight_plane.test_fanout_tracker import bucket, kept_at

READERS, HOSTS, BUCKETS = 12, 7, 10
CROWD = Crowd(READERS, HOSTS)


class Plain(Tracker):
    """Looks at every wish, and counts anew who could serve it; of equals it takes whom the other one takes."""

    def _candidates(self):
        return iter([*self._table.wishes.values()])

    @staticmethod
    def _may_have(wish: Wish, hope: bool) -> bool:
        return True

    def _source(self, wish: Wish) -> str | None:
        held, me, uploads, readers = wish.bucket.held, wish.me, self._table.uploads, self._table.readers
        serve = [name for name in held if self._may_serve(name, wish)]
        near = [name for name in serve if readers[name].host == me.host]
        if near:
            return min(near, key=lambda name: (uploads[name], name))
        others = [name for name in wish.bucket.fetching if self._may_serve(name, wish)]
        if me.downloads >= DOWNLOADS or any(readers[name].host == me.host for name in others):
            return None
        far = [name for name in serve if held[name].address]
        free = [name for name in far if uploads[name] < UPLOADS]
        if free:
            order = [*wish.bucket.hands]
            return min(free, key=lambda name: (uploads[name], order.index(name)))
        if far:
            return None
        if wish.bucket.publisher_failed:
            return PUBLISHER
        most = PUBLISHER_UPLOADS if wish.crowd.hosts > 1 else DOWNLOADS
        return PUBLISHER if not others and uploads[bucket(0)[:16]] < most else None


class Both:
    """One play of both trackers; everything that is said is said to both."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.now = chance, 0.0
        self.trackers = (Tracker(2.0), Plain(2.0))
        self.wishes: dict[int, tuple[str, int]] = {}
        self.taking: dict[tuple[str, int], str] = {}
        self.held: set[tuple[str, int]] = set()

    def say(self, what: str, *words, **more):
        first, second = (getattr(tracker, what)(*words, **more) for tracker in self.trackers)
        assert first == second
        return first

    def step(self) -> None:
        chance, name, number = self.chance, f"r{self.chance.randrange(READERS)}", self.chance.randrange(BUCKETS)
        host, what = f"h{int(name[1:]) % HOSTS}", self.chance.random()
        if what < 0.45:
            self.want(name, host, number, [], "")
        elif what < 0.75 and self.taking:
            reader, at = chance.choice([*self.taking])
            del self.taking[reader, at]
            ref = None if chance.random() < 0.2 else kept_at(reader, at, chance.choice(["", "tcp://a:1", "tcp://b:1"]))
            self.say("taken", reader, f"h{int(reader[1:]) % HOSTS}", bucket(at), ref, self.now)
        elif what < 0.85 and self.taking:
            (reader, at), source = chance.choice([*self.taking.items()])
            del self.taking[reader, at]
            refused = [source] if source else []
            self.want(reader, f"h{int(reader[1:]) % HOSTS}", at, refused,
                      chance.choice([SILENT, GONE, CORRUPT, REFUSED]) if refused else "")
        elif what < 0.9:
            self.say("dropped", name, [bucket(number)], publisher_failed=chance.random() < 0.1)
        elif what < 0.92:
            self.say("left", name)
            self.taking = {key: source for key, source in self.taking.items() if key[0] != name}
            self.wishes = {ticket: wish for ticket, wish in self.wishes.items() if wish[0] != name}
        elif self.wishes and what < 0.95:
            ticket = chance.choice([*self.wishes])
            self.say("withdraw", ticket)
            del self.wishes[ticket]
        self.now += chance.choice([0.0, 0.1, 1.0])
        if chance.random() < 0.6:
            for grant in self.say("decide", self.now):
                self.taking[self.wishes.pop(grant.ticket)] = grant.relay
        assert self.say("next_event", self.now) is None or self.wishes
        assert self.say("statistics")

    def want(self, name: str, host: str, number: int, refused: list[str], problem: str) -> None:
        self.wishes = {ticket: wish for ticket, wish in self.wishes.items() if wish != (name, number)}
        self.taking.pop((name, number), None)
        ticket = self.say("want", name, host, bucket(number), 100, crowd=CROWD, refused=refused, problem=problem)
        self.wishes[ticket] = (name, number)


@pytest.mark.parametrize("seed", range(12))
def test_decisions_are_those_of_looking_at_everything(seed):
    both = Both(random.Random(seed))
    for _ in range(1500):
        both.step()
        for tracker in both.trackers:
            for known in tracker._table.buckets.values():
                check_counted(tracker, known)


def check_counted(tracker: Tracker, known: Bucket) -> None:
    table = tracker._table
    far = {name for name, ref in known.held.items() if ref.address and table.readers[name].serves}
    assert set(known.far) == far and set(known.hands) == {name for name in far if table.uploads[name] < UPLOADS}
    coming = [table.readers[name].host for name in known.fetching if table.readers[name].serves]
    assert known.coming == {host: coming.count(host) for host in coming}
    assert all(known.name in table.readers[name].holds for name in known.held)
    assert all(known.name in table.readers[name].fetches for name in known.fetching)
