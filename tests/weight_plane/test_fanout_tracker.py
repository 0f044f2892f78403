"""What the tracker promises, with readers that are played: time is a number and nothing is sent."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.weight_plane.fanout_messages import CORRUPT, GONE, PUBLISHER, REFUSED, SILENT
from cosmos_actor.weight_plane.fanout_table import Crowd
from cosmos_actor.weight_plane.fanout_tracker import DOWNLOADS, OVERDUE_FACTOR, PUBLISHER_UPLOADS, Tracker

PATIENCE_S = 2.0
MANY = Crowd(8, 8)


def bucket(number: int) -> bytes:
    return b"p" * 16 + number.to_bytes(8, "little")


def kept_at(reader: str, number: int = 0, address: str = "tcp://there:1") -> BulkRef:
    return BulkRef(
        run_id="run", role="rollout", owner=reader, incarnation="0" * 32, host_id="h", address=address, pid=1, fd=1,
        arena=bytes(16), arena_bytes=1 << 30, offset=0, nbytes=100, dtype="uint8", shape=(100,),
        generation=number + 1, token=b"", digest=b"")


class Desk:
    """A tracker, and short words for what is done to it."""

    def __init__(self) -> None:
        self.tracker = Tracker(PATIENCE_S)
        self.now = 0.0
        self.tickets: dict[int, tuple[str, int]] = {}
        self.granted: dict[tuple[str, int], str] = {}

    def want(self, reader: str, number: int = 0, host: str = "", crowd: Crowd = MANY, refused: tuple[str, ...] = (),
             problem: str = "") -> str | None:
        """From whom `reader` is to take it; None: it has to wait."""
        ticket = self.tracker.want(reader, host or reader, bucket(number), 100, crowd=crowd, refused=list(refused),
                                   problem=problem)
        self.tickets[ticket] = (reader, number)
        self.granted.pop((reader, number), None)
        return self.decide().get((reader, number))

    def take(self, reader: str, number: int = 0, host: str = "", keep: bool = True) -> dict[tuple[str, int], str]:
        self.tracker.taken(reader, host or reader, bucket(number), kept_at(reader, number) if keep else None, self.now)
        return self.decide()

    def decide(self) -> dict[tuple[str, int], str]:
        """What was answered now: (reader, bucket) -> source."""
        now = {self.tickets[grant.ticket]: grant.relay for grant in self.tracker.decide(self.now)}
        self.granted.update(now)
        return now


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_bucket_leaves_the_publisher_once_and_then_comes_from_who_has_it(desk):
    assert desk.want("a") == PUBLISHER
    assert desk.want("b") is None and desk.want("c") is None
    assert desk.take("a") == {("b", 0): "a", ("c", 0): "a"}
    assert desk.want("d") is None, "a serves two already"
    assert desk.take("b") == {("d", 0): "b"}, "who serves nobody comes before who serves one"


def test_readers_take_different_buckets_from_the_publisher_and_few_at_a_time(desk):
    wants = [(reader, number) for reader in "abc" for number in range(4)]
    sources = {(reader, number): desk.want(reader, number) for reader, number in wants}
    assert [want for want, source in sources.items() if source == PUBLISHER] == [("a", 0), ("a", 1)]
    assert desk.take("a", 0) == {("b", 2): PUBLISHER, ("b", 0): "a", ("c", 0): "a"}
    assert PUBLISHER_UPLOADS == 2


def test_a_single_reader_takes_as_many_at_a_time_as_without_relays(desk):
    alone = Crowd(1, 1)
    sources = [desk.want("a", number, crowd=alone) for number in range(6)]
    assert sources == [PUBLISHER] * DOWNLOADS + [None] * 2


def test_one_reader_of_a_host_takes_it_over_the_network_and_the_others_from_its_memory(desk):
    assert desk.want("far") == PUBLISHER
    desk.take("far")
    assert desk.want("a", host="h") == "far"
    assert [desk.want(reader, host="h") for reader in "bcd"] == [None] * 3
    assert desk.take("a", host="h") == {(reader, 0): "a" for reader in "bcd"}, "any number at once: nothing is sent"
    for reader in "bcd":
        desk.take(reader, host="h", keep=False)
    assert desk.tracker.statistics()["near_bytes"] == 300
    assert desk.tracker.statistics()["relay_bytes"] == desk.tracker.statistics()["publisher_bytes"] == 100


def test_a_relay_that_cannot_be_reached_from_other_hosts_serves_its_own_only(desk):
    desk.want("a", host="h")
    desk.tracker.taken("a", "h", bucket(0), kept_at("a", address=""), 0.0)
    assert desk.want("b", host="h") == "a"
    assert desk.want("c") is None, "b has it soon"
    desk.take("b", host="h", keep=False)
    assert desk.want("d", 0) is None and desk.granted[("c", 0)] == PUBLISHER


@pytest.mark.parametrize("problem", [SILENT, GONE])
def test_a_source_that_was_given_up_is_not_named_again_to_that_reader(desk, problem):
    desk.want("relay"), desk.take("relay")
    assert desk.want("a") == "relay"
    assert desk.want("a", refused=("relay",), problem=problem) == PUBLISHER
    assert desk.want("b") is None, "a has it soon"
    assert desk.tracker.statistics()["problems"] == {problem: 1} and not desk.tracker.statistics()["corrupt"]
    desk.want("relay", 1), desk.take("relay", 1)  # it is heard of again, and has another bucket
    assert desk.want("c", 1) == "relay"


def accuse(desk: Desk, reader: str, relay: str, problem: str, number: int = 0, host: str = "") -> None:
    """`relay` is the only one that has the bucket, and `reader` says that it was no good."""
    assert desk.want(reader, number, host) == relay
    assert desk.want(reader, number, host, refused=(relay,), problem=problem) == PUBLISHER
    desk.take(reader, number, host, keep=False)


@pytest.mark.parametrize("problem", [CORRUPT, REFUSED])
def test_the_word_of_one_reader_keeps_a_relay_from_that_reader_alone(desk, problem):
    for number in range(4):
        desk.want("relay", number), desk.take("relay", number)
    for number in range(2):  # again and again, and in another life
        accuse(desk, f"a/{number}", "relay", problem, number)
        assert desk.want(f"a/{number}", 2) == PUBLISHER and not desk.tracker.is_banned("relay")
        desk.tracker.left(f"a/{number}")
    assert desk.want("b", 3) == "relay"
    assert desk.tracker.statistics()["corrupt"] == ({"relay": 2} if problem == CORRUPT else {})


@pytest.mark.parametrize("problem", [CORRUPT, REFUSED])
def test_a_relay_that_readers_of_two_hosts_accuse_is_named_to_nobody_in_that_life(desk, problem):
    for number in range(4):
        desk.want("relay", number), desk.take("relay", number)
    accuse(desk, "a", "relay", problem, 0, host="h")
    accuse(desk, "b", "relay", problem, 1, host="h")
    assert not desk.tracker.is_banned("relay"), "the memory of one host may be bad"
    accuse(desk, "c", "relay", problem, 2)
    assert desk.tracker.is_banned("relay")
    assert desk.want("d", 3) == PUBLISHER and desk.want("e", 3) is None
    desk.tracker.left("relay")
    desk.want("relay", 4), desk.take("relay", 4)
    assert desk.want("d", 4) == "relay", "another life of it"


def test_a_word_about_whom_one_was_not_sent_to_counts_for_nobody_else(desk):
    desk.want("relay"), desk.take("relay")
    desk.want("other", 1), desk.take("other", 1)
    for liar in ("a", "b"):
        assert desk.want(liar, 1) == "other"
        desk.want(liar, 1, refused=("relay",), problem=CORRUPT)
        desk.tracker.left(liar)
    assert not desk.tracker.is_banned("relay") and desk.want("c") == "relay"


def test_a_reader_does_not_wait_for_what_another_takes_that_it_can_not_reach(desk):
    assert desk.want("a") == PUBLISHER
    assert desk.want("b", refused=("a",)) == PUBLISHER and desk.want("c") is None


def test_who_is_overdue_is_not_waited_for(desk):
    assert desk.want("stopped") == PUBLISHER
    assert desk.want("a") is None
    due = desk.tracker.next_event(desk.now)
    assert due == OVERDUE_FACTOR * PATIENCE_S
    desk.now = due
    assert desk.decide() == {("a", 0): PUBLISHER}
    desk.take("a")
    assert desk.want("b") == "a"
    assert desk.take("stopped") == {}, "it went on, and has it after all"
    assert desk.want("c") == "stopped", "which serves nobody yet"


def test_on_a_slow_network_more_patience_is_shown(desk):
    desk.want("a")
    desk.now = 2.5
    desk.take("a")
    assert desk.tracker.silent_s == 7.5
    for number in range(1, 60):
        desk.want("a", number)
        desk.take("a", number)
    assert desk.tracker.silent_s == PATIENCE_S


@pytest.mark.parametrize("how", ["left", "dropped"])
def test_who_leaves_or_gives_up_is_not_waited_for_and_not_named(desk, how):
    assert desk.want("a") == PUBLISHER and desk.want("b") is None
    leave = {"left": lambda: desk.tracker.left("a"), "dropped": lambda: desk.tracker.dropped("a", [bucket(0)])}[how]
    leave()
    assert desk.decide() == {("b", 0): PUBLISHER}
    desk.take("b")
    desk.tracker.dropped("b", [bucket(0)])
    assert desk.want("c") == PUBLISHER


def test_a_publisher_that_is_gone_is_waited_for_by_nobody(desk):
    assert desk.want("a", 0) == desk.want("b", 1) == PUBLISHER
    assert desk.want("c", 0) is desk.want("d", 2) is None
    desk.tracker.dropped("a", [bucket(0)], publisher_failed=True)
    assert desk.decide() == {("c", 0): PUBLISHER, ("d", 2): PUBLISHER}


def test_what_nobody_has_or_wants_is_forgotten(desk):
    for reader in "abc":
        desk.want(reader), desk.take(reader)
    for reader in "abc":
        desk.tracker.dropped(reader, [bucket(0)])
    desk.want("d", 1)
    desk.tracker.withdraw(max(desk.tickets))
    desk.tracker.left("d")
    table = desk.tracker._table
    assert not (table.buckets or table.wishes or table.under_way or table.uploads)
    assert not any(known.downloads or known.holds or known.fetches for known in table.readers.values())


@pytest.mark.parametrize("seed", range(16))
def test_whatever_readers_do_every_other_one_gets_every_bucket(seed):
    """Readers join late, leave, stop for good, go on, and have wrong bytes; the rest are done in bounded time."""
    play = _Play(random.Random(seed))
    play.run()
    assert play.missing() == {}
    assert play.desk.tracker.statistics()["waiting"] == 0


def test_undisturbed_the_publisher_sends_one_copy():
    play = _Play(random.Random(0), disturbed=False)
    play.run()
    assert play.missing() == {} and play.sent[PUBLISHER] == _Play.BUCKETS
    assert max(count for source, count in play.sent.items() if source != PUBLISHER) <= 2 * _Play.BUCKETS


class _Play:
    """Each bucket takes one second from whomever; every reader wants them in order, 8 at a time."""

    READERS, BUCKETS, AT_ONCE = 8, 16, 8

    def __init__(self, chance: random.Random, disturbed: bool = True) -> None:
        self.chance, self.desk = chance, Desk()
        names = [f"r{number}" for number in range(self.READERS)]
        self.host = {name: f"h{number // 2 if disturbed and chance.random() < 0.3 else name}"
                     for number, name in enumerate(names)}
        self.has: dict[str, set[int]] = {name: set() for name in names}
        self.refused: dict[tuple[str, int], list[str]] = {}
        self.under_way: dict[tuple[str, int], tuple[str, float]] = {}
        self.sent: Counter[str] = Counter()
        bad = names[:3] if disturbed else []
        self.begins = {name: chance.uniform(0, 10) if disturbed else 0.0 for name in names}
        self.leaves = {name: chance.uniform(1, 20) for name in bad[:1]}
        self.stops = {name: chance.uniform(1, 20) for name in bad[1:2]}
        self.corrupt = set(bad[2:3])

    def run(self) -> None:
        while self.missing() and self.desk.now < 400:
            self.desk.now += 0.5
            for name in list(self.has):
                self._step(name)
            for reader, number in self.desk.decide():
                self._note(reader, number)

    def missing(self) -> dict[str, int]:
        lasting = [name for name in self.has if name not in self.leaves and name not in self.stops]
        return {name: self.BUCKETS - len(self.has[name]) for name in lasting if len(self.has[name]) < self.BUCKETS}

    def _stopped(self, name: str) -> bool:
        return self.desk.now >= self.stops.get(name, 1e9)

    def _step(self, name: str) -> None:
        if self.desk.now >= self.leaves.get(name, 1e9):
            self.desk.tracker.left(name)
            del self.has[name], self.leaves[name]
            return
        if self.desk.now < self.begins[name] or self._stopped(name):
            return
        for (reader, number), (source, since) in list(self.under_way.items()):
            if reader == name:
                self._end(reader, number, source, self.desk.now - since)
        wanted = [number for number in range(self.BUCKETS) if number not in self.has[name]][:self.AT_ONCE]
        for number in wanted:
            if (name, number) not in self.under_way:
                self._want(name, number, "")

    def _want(self, name: str, number: int, problem: str) -> None:
        for ticket in [ticket for ticket, wish in self.desk.tickets.items() if wish == (name, number)]:
            self.desk.tracker.withdraw(ticket)
        self.desk.want(name, number, self.host[name], refused=tuple(self.refused.get((name, number), ())),
                       problem=problem)
        for reader, other in list(self.desk.granted):
            self._note(reader, other)

    def _note(self, reader: str, number: int) -> None:
        source = self.desk.granted.pop((reader, number), None)
        if source is not None and reader in self.has:
            self.under_way[reader, number] = (source, self.desk.now)

    def _end(self, reader: str, number: int, source: str, seconds: float) -> None:
        gone = source != PUBLISHER and source not in self.has
        silent = source in self.has and self._stopped(source)
        if seconds < (self.desk.tracker.silent_s if silent else 1.0):
            return
        del self.under_way[reader, number]
        if gone or silent or source in self.corrupt:
            self.refused.setdefault((reader, number), []).append(source)
            self._want(reader, number, GONE if gone else SILENT if silent else CORRUPT)
            return
        self.has[reader].add(number)
        self.sent[source] += 1
        self.desk.take(reader, number, self.host[reader])
        for other in list(self.desk.granted):
            self._note(*other)
