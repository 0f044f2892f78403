"""Readers that pass buckets on: real stores, servers and streams in one process, each reader as if on its own host."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.bulk.streams import StreamClient
from cosmos_actor.bus.errors import BulkGone, DeadlineExceeded
from cosmos_actor.bus.keys import KeyRing, make_run_keys
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.fanout import DeskUnreachable, FanOutSource
from cosmos_actor.weight_plane.fanout_desk import FanOutDesk
from cosmos_actor.weight_plane.fanout_messages import BucketsDropped, BucketTaken, BucketWanted, name_of
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.version import Version
from tests.bulk.tools import elsewhere, identity, served

PATIENCE_S = 0.4
DEADLINE_S = 20.0
BUCKETS, BUCKET_BYTES = 6, MIB // 4
BULK = BulkSettings(budget_bytes=16 * MIB, chunk_bytes=MIB, lost_s=0.5)


def a_model(step: int) -> dict[str, np.ndarray]:
    """One tensor a bucket."""
    rng = np.random.default_rng(step)
    return {f"layer{number}": rng.integers(0, 256, BUCKET_BYTES, np.uint8) for number in range(BUCKETS)}


class Seen:
    """A store whose references look to others as those of the host they name."""

    def __init__(self, store: BulkStore, host: str) -> None:
        self._store, self._host = store, host
        self.settings, self.release = store.settings, store.release
        self.corrupt = False
        self.address = ""
        """Of a door that leads nowhere; empty: its own."""

    def try_put(self, array: Any, **options: Any) -> Any:
        if self.corrupt:
            array = array.copy()
            array.reshape(-1).view(np.uint8)[-1] ^= 1
        ref = self._store.try_put(array, **options)
        there = {"address": self.address} if self.address else {}
        return elsewhere(ref, host_id=self._host, **there) if self._host else ref


class Reader:
    """One rollout's side of the weight plane. `host` empty: really this one, so that its memory can be mapped."""

    def __init__(self, world: World, name: str, host: str, key: str, budget_bytes: int) -> None:
        self.store = BulkStore(identity(name), BulkSettings(**{**vars(BULK), "budget_bytes": budget_bytes}))
        world.at_end.callback(self.store.close)
        self.server = world.at_end.enter_context(served(self.store, world.keys and world.keys[key]))
        self.bulk = BulkReader(BULK, StreamClient(BULK, world.keys and world.keys["rollout"]))
        world.at_end.callback(self.bulk.close)
        self.seen = Seen(self.store, host)
        self.link = SimpleNamespace(peer=name, host_id=host or "here", role="rollout")
        self.desk = world.desk
        self.source = FanOutSource(self.bulk, self.seen, self, patience_s=PATIENCE_S, budget_bytes=budget_bytes)
        self.subscriber = WeightSubscriber(self.bulk, "run", self.source)

    async def ask(self, wanted: Any, deadline_s: float) -> Any:
        try:
            return await asyncio.wait_for(self.desk._on_wanted(wanted, self.link), deadline_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded("no answer of the desk") from None

    def tell(self, event: Any) -> None:
        heard = {BucketTaken: self.desk._on_taken, BucketsDropped: self.desk._on_dropped}[type(event)]
        heard(event, self.link)

    async def pull(self, manifest: Manifest, deadline_s: float = DEADLINE_S) -> str:
        """The digest of what came."""
        return weights_digest(await self.subscriber.pull(manifest, deadline_s))

    def statistics(self, *names: str) -> Any:
        found = self.source.statistics()
        return found if not names else tuple(found[name] for name in names)


class World:
    """A publisher, a desk, and the readers that a test asks for."""

    def __init__(self, at_end: ExitStack, keys: dict[str, KeyRing] | None = None) -> None:
        self.at_end, self.keys = at_end, keys
        self.links: dict[str, Any] = {}
        bus: Any = SimpleNamespace(links=self.links, serve=lambda *_, **__: None, serve_event=lambda *_: None,
                                   on_link_down=lambda *_: None)
        self.desk = FanOutDesk(bus, PATIENCE_S)
        self.store = BulkStore(identity("policy-0"), BULK)
        at_end.callback(self.store.close)
        self.server = at_end.enter_context(served(self.store, keys and keys["policy"]))
        self.publisher_host = "trainer"
        self._publisher = WeightPublisher(Seen(self.store, self.publisher_host), bucket_bytes=BUCKET_BYTES)

    def reader(self, name: str, host: str | None = None, key: str = "rollout", budget_bytes: int = 16 * MIB) -> Reader:
        made = Reader(self, name, name if host is None else host, key, budget_bytes)
        self.links[name] = made.link
        return made

    def readers(self, count: int) -> list[Reader]:
        return [self.reader(f"rollout-{number}") for number in range(count)]

    def publish(self, step: int = 1) -> Manifest:
        return self._publisher.publish(Version("run", 0, step), a_model(step))

    def leave(self, reader: Reader) -> None:
        """As the bus says it, when a process was killed."""
        del self.links[reader.link.peer]
        self.desk._on_link_down(reader.link, "gone")

    @property
    def sent_bytes(self) -> int:
        return self.server.statistics()["chunk_bytes"]


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as at_end:
        yield World(at_end)


def play(scene: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 30.0))


async def both(readers: list[Reader], manifest: Manifest) -> list[Any]:
    return await asyncio.gather(*(reader.pull(manifest) for reader in readers), return_exceptions=True)


def test_every_reader_takes_the_version_and_the_publisher_sends_it_once(world):
    async def scene():
        readers = world.readers(5)
        for step in (1, 2):
            manifest = world.publish(step)
            assert await both(readers, manifest) == [manifest.digest] * 5
            assert world.sent_bytes == step * BUCKETS * BUCKET_BYTES
        took = [reader.statistics("publisher_bytes", "relay_bytes") for reader in readers]
        assert sum(first for first, _ in took) == world.sent_bytes
        assert all(first + second == world.sent_bytes for first, second in took)
        assert world.desk.counts()["fan_out/relay_bytes"] == 4 * world.sent_bytes
        kept = [reader.statistics("kept_bytes")[0] for reader in readers]
        assert kept == [BUCKETS * BUCKET_BYTES] * 5, "the newest version, and no older one"

    play(scene)


def test_a_late_reader_takes_it_from_the_others(world):
    async def scene():
        first, second = world.readers(2)
        manifest = world.publish()
        await both([first, second], manifest)
        sent = world.sent_bytes
        late = world.reader("rollout-9")
        assert await late.pull(manifest) == manifest.digest
        assert world.sent_bytes == sent and late.statistics("publisher_bytes") == (0,)

    play(scene)


def test_one_reader_of_a_host_takes_it_over_the_network_and_the_others_out_of_its_memory(world):
    async def scene():
        readers = [world.reader(f"rollout-{number}", host="") for number in range(3)]
        manifest = world.publish()
        assert await both(readers, manifest) == [manifest.digest] * 3
        whole = BUCKETS * BUCKET_BYTES
        assert world.sent_bytes == whole
        assert sum(reader.statistics("near_bytes")[0] for reader in readers) == 2 * whole
        assert sum(reader.statistics("kept_bytes")[0] for reader in readers) == whole, "one copy for the host"
        assert sum(reader.server.statistics()["asks"] for reader in readers) == 0

    play(scene)


def test_on_the_publishers_host_nobody_is_asked_and_nothing_is_kept(world):
    async def scene():
        world._publisher._store._host = ""
        reader, other = world.reader("rollout-0", host=""), world.reader("rollout-1", host="")
        reader.ask = None
        manifest = world.publish()
        assert await reader.pull(manifest) == manifest.digest
        assert reader.statistics("local_bytes", "kept_bytes") == (BUCKETS * BUCKET_BYTES, 0)
        assert world.sent_bytes == 0 and other.statistics("kept_bytes") == (0,)

    play(scene)


def test_a_relay_with_wrong_bytes_is_named_counted_and_asked_no_more(world, caplog):
    async def scene():
        liar, *others = world.readers(4)
        liar.seen.corrupt = True
        manifest = world.publish()
        assert await liar.pull(manifest) == manifest.digest
        assert await both(others, manifest) == [manifest.digest] * 3
        accused = [reader.statistics()["corrupt"] for reader in others]
        assert {name for counts in accused for name in counts} == {"rollout-0"}
        assert world.desk.counts()["fan_out/corrupt/rollout-0"] == sum(sum(counts.values()) for counts in accused)
        assert "from rollout-0 that are not the manifest's" in caplog.text
        sent = liar.server.statistics()["chunks"]
        second = world.publish(2)
        assert await both([liar, *others], second) == [second.digest] * 4
        assert liar.server.statistics()["chunks"] == sent

    play(scene)


def test_a_relay_whose_key_is_wrong_is_refused_and_asked_no_more(tmp_path: Path):
    made = make_run_keys(tmp_path / "a", "run", ["rollout", "policy"])
    keys = {role: KeyRing.load(path) for role, path in made.items()}
    keys["other"] = KeyRing.load(make_run_keys(tmp_path / "b", "run", ["rollout"])["rollout"])
    with ExitStack() as at_end:
        world = World(at_end, keys)

        async def scene():
            stranger, other = world.reader("rollout-0", key="other"), world.reader("rollout-1")
            manifest = world.publish()
            await stranger.pull(manifest)
            assert await other.pull(manifest) == manifest.digest
            assert other.statistics("relay_bytes") == (0,) and set(other.statistics()["given_up"]) == {"refused"}
            assert world.desk.statistics()["problems"]["refused"] >= 1

        play(scene)


def test_a_relay_that_can_not_be_reached_is_tried_once_and_not_for_each_bucket(world):
    async def scene():
        behind, other = world.readers(2)
        behind.seen.address = "tcp://127.0.0.1:9"
        manifest = world.publish()
        await behind.pull(manifest)
        assert await other.pull(manifest) == manifest.digest
        assert other.statistics()["given_up"].get("gone", 0) <= 4, "those that were taken at the same time"
        second = world.publish(2)
        assert await both([behind, other], second) == [second.digest] * 2
        assert other.statistics()["given_up"].get("gone", 0) <= 4

    play(scene)


def test_a_relay_that_is_stopped_costs_the_patience_once(world):
    async def scene():
        stopped, *others = world.readers(3)
        manifest = world.publish()
        await stopped.pull(manifest)
        goes_on = threading.Event()
        answer = stopped.server.answer
        stopped.server.answer = lambda frames: (goes_on.wait(20.0), answer(frames))[1]
        begun = asyncio.get_running_loop().time()
        assert await both(others, manifest) == [manifest.digest] * 2
        assert asyncio.get_running_loop().time() - begun < 6 * PATIENCE_S
        assert world.sent_bytes <= 2.5 * BUCKETS * BUCKET_BYTES, "one copy for the relay, one for the others"
        goes_on.set()

    play(scene)


def test_a_reader_that_stops_before_it_has_the_bucket_is_not_waited_for(world):
    async def scene():
        stopped, other = world.readers(2)
        manifest = world.publish()
        never = asyncio.Event()
        stopped.bulk.fetch = lambda ref, **_: never.wait()
        hangs = asyncio.ensure_future(stopped.pull(manifest))
        await asyncio.sleep(0)
        begun = asyncio.get_running_loop().time()
        assert await other.pull(manifest) == manifest.digest
        assert asyncio.get_running_loop().time() - begun < 6 * PATIENCE_S
        hangs.cancel()
        await asyncio.gather(hangs, return_exceptions=True)

    play(scene)


def test_a_relay_that_dies_in_the_middle_is_replaced(world):
    async def scene():
        relay, *others = world.readers(3)
        manifest = world.publish()
        await relay.pull(manifest)
        answer = relay.server.answer

        def die_after_two(frames):
            if relay.server.statistics()["chunks"] == 2:
                relay.server._closing = True
                loop.call_soon_threadsafe(world.leave, relay)
                raise SystemExit
            return answer(frames)

        loop = asyncio.get_running_loop()
        relay.server._answer_one = lambda real=relay.server._answer_one: _quietly(real)
        relay.server.answer = die_after_two
        assert await both(others, manifest) == [manifest.digest] * 2

    play(scene)


def _quietly(answer_one: Callable[[], None]) -> None:
    try:
        answer_one()
    except SystemExit:
        pass  # the ask has no answer any more


def test_who_leaves_and_who_joins_in_the_middle_holds_nobody_up(world):
    async def scene():
        leaving, *staying = world.readers(4)
        manifest = world.publish()
        half = threading.Event()
        answer = world.server.answer

        def slowly(frames):
            if world.server.statistics()["chunks"] == BUCKETS // 2:
                half.wait(20.0)
            return answer(frames)

        world.server.answer = slowly
        pulls = [asyncio.ensure_future(reader.pull(manifest)) for reader in [leaving, *staying]]
        while world.server.statistics()["chunks"] < BUCKETS // 2:
            await asyncio.sleep(0.01)
        pulls[0].cancel()
        world.leave(leaving)
        joining = world.reader("rollout-8")
        pulls.append(asyncio.ensure_future(joining.pull(manifest)))
        half.set()
        assert await asyncio.gather(*pulls[1:]) == [manifest.digest] * 4
        assert world.sent_bytes <= 2 * BUCKETS * BUCKET_BYTES

    play(scene)


@pytest.mark.parametrize("how", ["refuses", "is mute"])
def test_without_a_desk_each_takes_it_from_the_publisher(world, how):
    async def scene():
        async def ask(wanted, deadline_s):
            if how == "is mute":
                await asyncio.sleep(deadline_s)
            raise DeskUnreachable("no link to a controller")

        readers = world.readers(2)
        for reader in readers:
            reader.ask = ask
        manifest = world.publish()
        begun = asyncio.get_running_loop().time()
        assert await both(readers, manifest) == [manifest.digest] * 2
        assert asyncio.get_running_loop().time() - begun < 5 * PATIENCE_S
        assert world.sent_bytes == 2 * BUCKETS * BUCKET_BYTES
        assert readers[0].statistics("without_desk")[0] >= 1

    play(scene)


def test_a_publisher_that_is_gone_ends_every_pull_soon_and_the_next_version_arrives(world):
    async def scene():
        readers = world.readers(4)
        manifest = world.publish()
        world._publisher.close()
        begun = asyncio.get_running_loop().time()
        ends = await both(readers, manifest)
        assert [type(end) for end in ends] == [BulkGone] * 4
        assert asyncio.get_running_loop().time() - begun < 4.0
        assert all(reader.subscriber.newest is None for reader in readers)
        second = world.publish(2)
        assert await both(readers, second) == [second.digest] * 4

    play(scene)


def test_a_version_that_does_not_come_in_time_is_said_with_the_setting(world):
    async def scene():
        stuck, late = world.readers(2)
        blocked = threading.Event()
        answer = world.server.answer
        world.server.answer = lambda frames: (blocked.wait(20.0), answer(frames))[1]
        manifest = world.publish()
        ends = await asyncio.gather(*(reader.pull(manifest, 0.6) for reader in (stuck, late)), return_exceptions=True)
        blocked.set()
        assert [type(end) for end in ends] == [DeadlineExceeded] * 2

    play(scene)


def test_no_more_is_kept_than_half_of_the_store_and_older_versions_go_first(world):
    async def scene():
        small, other = world.reader("rollout-0", budget_bytes=2 * 4 * BUCKET_BYTES), world.reader("rollout-1")
        first, second = world.publish(1), world.publish(2)
        assert await both([small, other], first) == [first.digest] * 2
        assert small.statistics("kept_bytes", "not_kept") == (4 * BUCKET_BYTES, 2)
        assert await both([small, other], second) == [second.digest] * 2
        assert set(small.source._kept) <= {name_of(ref) for ref in second.buckets}
        assert small.statistics("kept_bytes") == (4 * BUCKET_BYTES,)
        assert small.store.statistics()["payload_bytes"] == 4 * BUCKET_BYTES

    play(scene)


def test_a_single_reader_keeps_nothing(world):
    async def scene():
        reader = world.reader("rollout-0")
        manifest = world.publish()
        assert await reader.pull(manifest) == manifest.digest
        assert reader.statistics("kept_bytes", "publisher_bytes") == (0, BUCKETS * BUCKET_BYTES)

    play(scene)


def test_the_desk_answers_within_the_patience_also_when_there_is_no_source(world):
    async def scene():
        holder, waiting = world.readers(2)
        manifest = world.publish()
        asked: asyncio.Queue[Any] = asyncio.Queue()

        async def hang(ref, **_):
            asked.put_nowait(ref)
            await asyncio.Event().wait()

        holder.bulk.fetch = hang
        hangs = asyncio.ensure_future(holder.pull(manifest))
        ref = await asked.get()
        wanted = BucketWanted(name_of(ref), ref.nbytes, ref.host_id, [], "")
        answer = await waiting.ask(wanted, 2 * PATIENCE_S)
        assert not answer.ready and world.desk.statistics()["waiting"] <= BUCKETS
        hangs.cancel()
        await asyncio.gather(hangs, return_exceptions=True)

    play(scene)
