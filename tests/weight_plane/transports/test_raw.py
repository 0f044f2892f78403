"""Raw streams: whole and right, or one typed line in time, whatever the other end does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from cosmos_actor.bus.bulk.settings import MIB
from cosmos_actor.bus.errors import BulkCorrupt, BulkGone, BusError, CorruptFrame, DeadlineExceeded
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.transports import raw_client as raw_client_module
from cosmos_actor.weight_plane.transports import raw_server as raw_server_module
from cosmos_actor.weight_plane.transports import raw_wire as wire
from cosmos_actor.weight_plane.transports.interface import TransportLost
from cosmos_actor.weight_plane.transports.raw_client import RawClient
from cosmos_actor.weight_plane.transports.raw_connection import RawConnection
from cosmos_actor.weight_plane.transports.raw_socket import host_and_port
from tests.bulk.tools import elsewhere, pattern, store
from tests.waiting import eventually

from .tools import DEADLINE_S, QUICK, Publisher, raw_client, raw_server

BUDGET = 64 * MIB


def fetch(client: RawClient, ref, deadline_s: float = DEADLINE_S, silent_s: float | None = None) -> np.ndarray:
    return asyncio.run(client.fetch(ref, deadline_s=deadline_s, silent_s=silent_s))


@pytest.mark.parametrize("digested", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4 * MIB, 21 * MIB + 5])
def test_what_was_put_arrives_whole_and_read_only(nbytes, digested):
    with store(BUDGET) as made, raw_server(made) as server, raw_client(digested=digested) as client:
        sent = pattern(nbytes)
        found = fetch(client, elsewhere(made.try_put(sent, holder="a"), address=server.address))
        assert np.array_equal(found, sent) and not found.flags.writeable
        assert server.statistics()["piece_bytes"] == nbytes


def test_shapes_and_dtypes_survive_also_without_a_byte():
    with store(BUDGET) as made, raw_server(made) as server, raw_client() as client:
        for sent in (np.zeros((0, 3), np.float32), np.array(3.5), np.arange(12, dtype=np.int16).reshape(3, 4)):
            found = fetch(client, elsewhere(made.try_put(sent, holder="a"), address=server.address))
            assert found.dtype == sent.dtype and np.array_equal(found, sent)


def test_several_arrays_share_the_lanes_and_the_lanes_are_as_many_as_asked_for():
    with store(BUDGET) as made, raw_server(made) as server, raw_client(streams=3) as client:
        sent = [pattern(6 * MIB) + np.uint8(number) for number in range(4)]
        refs = [elsewhere(made.try_put(array, holder="a"), address=server.address) for array in sent]

        async def all_at_once():
            return await asyncio.gather(*(client.fetch(ref, deadline_s=DEADLINE_S) for ref in refs))

        assert all(np.array_equal(one, other) for one, other in zip(asyncio.run(all_at_once()), sent, strict=True))
        assert client.statistics()["lanes"] == server.statistics()["connections"] == 3


def test_who_has_not_the_token_gets_no_byte_and_is_hung_up_on():
    with store(BUDGET) as made, raw_server(made) as server, raw_client() as client:
        ref = elsewhere(made.try_put(pattern(MIB), holder="a"), address=server.address)
        with pytest.raises(BulkGone, match="no valid reference"):
            fetch(client, replace(ref, token=b"0" * 16))
        assert "piece_bytes" not in server.statistics()
        eventually(lambda: server.statistics()["connections"] == 0, "the hang-up")


def test_who_asked_for_more_before_the_refusal_came_hears_why():
    """Not that the connection was reset."""
    with store(BUDGET) as made, raw_server(made) as server:
        ref = elsewhere(made.try_put(pattern(MIB), holder="a"), address=server.address)
        forged = replace(ref, token=bytes(16))
        connection = RawConnection(server.address, 5.0)
        first, *_ = [(connection.ask(wire.PLAIN, forged, 0, 1), time.sleep(0.1))[0] for _ in range(4)]
        with pytest.raises(BulkGone, match="no valid reference"):
            connection.answer(first, forged)
        connection.close()
        eventually(lambda: server.statistics()["connections"] == 0, "the end of the connection")


def test_a_proof_that_was_overheard_holds_for_no_other_connection():
    with store(BUDGET) as made, raw_server(made) as server:
        ref = elsewhere(made.try_put(pattern(MIB), holder="a"), address=server.address)
        with contextlib.closing(RawConnection(server.address, 2.0)) as first:
            said = wire.pack_ask(wire.Ask(wire.PLAIN, 1, ref.arena, ref.generation, 0, 100), ref.token,
                                 first._challenge)
        with contextlib.closing(RawConnection(server.address, 2.0)) as second:
            second.socket.sendall(said)
            with pytest.raises(BulkGone, match="no valid reference"):
                second.answer(wire.Ask(wire.PLAIN, 1, ref.arena, ref.generation, 0, 100), ref)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 200, b"\xff" * 80])
def test_what_is_no_ask_ends_its_connection_and_no_other(said):
    with store(BUDGET) as made, raw_server(made) as server, raw_client() as client:
        ref = elsewhere(made.try_put(pattern(MIB), holder="a"), address=server.address)
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])), 2.0) as stranger:
            stranger.sendall(said)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(4096):
                    pass
        assert np.array_equal(fetch(client, ref), pattern(MIB))


def test_an_array_that_was_freed_or_is_of_another_life_is_gone():
    with store(BUDGET) as made, store(BUDGET) as other, raw_server(made) as server, raw_client() as client:
        ref = elsewhere(made.try_put(pattern(MIB), holder="a"), address=server.address)
        foreign = elsewhere(other.try_put(pattern(MIB), holder="a"), address=server.address)
        made.release(ref, "a")
        with pytest.raises(BulkGone, match="the lease ended"):
            fetch(client, ref)
        with pytest.raises(BulkGone, match="started anew"):
            fetch(client, foreign)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "raw://", "raw://:5", "raw://host:0", "raw://host:x"])
def test_an_address_that_is_none_is_refused_before_anything_is_dialled(address):
    with store() as made, raw_client() as client, pytest.raises(CorruptFrame):
        fetch(client, elsewhere(made.try_put(pattern(8), holder="a"), address=address))


def test_a_larger_array_than_allowed_is_refused_before_memory_is_taken():
    with store() as made, raw_client(replace(QUICK, max_array_bytes=10)) as client:
        with pytest.raises(BulkCorrupt, match="max_array_bytes"):
            fetch(client, elsewhere(made.try_put(pattern(11), holder="a"), address="raw://127.0.0.1:1"))


# -- a server that misbehaves ---------------------------------------------------------------------------------------


Behaviour = Callable[[socket.socket, wire.Ask, bytes], bool]


@contextlib.contextmanager
def misbehaving(ref, answer: Behaviour) -> Iterator[str]:
    """A server that knows the token; `answer(connection, ask, challenge)` is false when it hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(made: socket.socket) -> None:
        with made, contextlib.suppress(OSError, struct.error):
            greeting = wire.pack_greeting()
            made.sendall(greeting)
            while data := made.recv(wire.ASK_BYTES, socket.MSG_WAITALL):
                if not answer(made, wire.unpack_ask(data)[0], wire.unpack_greeting(greeting)):
                    return

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"raw://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def answered(ask: wire.Ask, challenge: bytes, token: bytes, payload: bytes) -> bytes:
    digested = payload if ask.kind == wire.DIGESTED else b""
    return wire.pack_answer(ask, wire.YES, ask.length, wire.answer_digest(ask, token, challenge, digested)) + payload


def against(answer, nbytes: int = MIB, deadline_s: float = 10.0) -> tuple[BusError, float]:
    """(what a fetch raised, after how long)"""
    with store(BUDGET) as made, raw_client() as client:
        ref = made.try_put(pattern(nbytes), holder="a")
        with misbehaving(ref, lambda *facts: answer(ref, *facts)) as address:
            begun = time.monotonic()
            with pytest.raises(BusError) as caught:
                fetch(client, elsewhere(ref, address=address), deadline_s)
            return caught.value, time.monotonic() - begun


def test_bytes_that_were_changed_on_the_way_are_asked_for_again_and_then_refused():
    def damage(ref, made, ask, challenge):
        good = bytearray(answered(ask, challenge, ref.token, pattern(MIB).tobytes()))
        good[-1] ^= 1
        made.sendall(good)
        return True

    error, _ = against(damage)
    assert isinstance(error, BulkCorrupt) and "3 times" in str(error)


def test_one_that_was_changed_once_still_arrives():
    with store(BUDGET) as made, raw_client() as client:
        ref = made.try_put(pattern(MIB), holder="a")
        damaged = iter([True])

        def once(made, ask, challenge):
            good = bytearray(answered(ask, challenge, ref.token, pattern(MIB).tobytes()))
            good[-1] ^= next(damaged, False)
            made.sendall(good)
            return True

        with misbehaving(ref, once) as address:
            assert np.array_equal(fetch(client, elsewhere(ref, address=address)), pattern(MIB))
        assert client.statistics()["damaged"] == client.statistics()["asked_again"] == 1


def test_an_answer_that_is_cut_off_each_time_is_lost_with_its_progress():
    def cut(ref, made, ask, challenge):
        made.sendall(answered(ask, challenge, ref.token, pattern(MIB).tobytes())[:1000])
        return False

    error, took = against(cut)
    assert isinstance(error, TransportLost) and took < 3
    assert "0 of 1 pieces" in str(error) and "the connection ended after" in str(error)


def test_an_answer_of_another_length_is_refused_before_it_is_read():
    def longer(ref, made, ask, challenge):
        made.sendall(wire.pack_answer(ask, wire.YES, ask.length + 1, b"0" * 32) + b"x" * (ask.length + 1))
        return True

    error, _ = against(longer)
    assert isinstance(error, TransportLost) and f"answered as ask 1 with {MIB + 1}" in str(error)


def test_a_server_that_stays_silent_is_lost_long_before_the_deadline():
    error, took = against(lambda ref, made, ask, challenge: True, deadline_s=30.0)
    assert isinstance(error, TransportLost) and "silent" in str(error) and took < 5


def test_the_deadline_holds_against_a_server_that_drips():
    def drip(ref, made, ask, challenge):
        for byte in answered(ask, challenge, ref.token, pattern(MIB).tobytes()):
            made.sendall(bytes([byte]))
            time.sleep(0.05)
        return True

    error, took = against(drip, deadline_s=1.0)
    assert isinstance(error, DeadlineExceeded) and took < 1.5 and "`weights.deadline_s`" in str(error)


def test_who_has_another_source_waits_no_longer_than_it_says():
    with store(BUDGET) as made, raw_client(replace(QUICK, overdue_s=20.0)) as client:
        ref = made.try_put(pattern(MIB), holder="a")
        with misbehaving(ref, lambda made, ask, challenge: True) as address:
            with pytest.raises(DeadlineExceeded, match="nothing more for 0.3 s"):
                fetch(client, elsewhere(ref, address=address), silent_s=0.3)


def test_who_listens_there_is_another_program_altogether():
    with store() as made, raw_client() as client, socket.create_server(("127.0.0.1", 0)) as listener:
        def greet() -> None:
            with contextlib.suppress(OSError):
                listener.accept()[0].sendall(b"220 mail.example.org ESMTP Postfix\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        address = f"raw://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BulkGone, match="no server of raw streams"):
            fetch(client, elsewhere(made.try_put(pattern(8), holder="a"), address=address))
        thread.join()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"raw://127.0.0.1:{listener.getsockname()[1]}"
    with store() as made, raw_client() as client:
        with pytest.raises(BulkGone, match="nobody listens there"):
            fetch(client, elsewhere(made.try_put(pattern(8), holder="a"), address=address))


def test_a_port_that_a_firewall_closes_is_named_as_that():
    """A queue that is full drops whoever knocks, as a firewall does."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = listener.getsockname()[1]
        for _ in range(2):
            knocker = stack.enter_context(socket.socket())
            knocker.setblocking(False)
            knocker.connect_ex(("127.0.0.1", port))
        made, client = stack.enter_context(store()), stack.enter_context(raw_client())
        with pytest.raises(BulkGone, match="closed by a firewall"):
            fetch(client, elsewhere(made.try_put(pattern(8), holder="a"), address=f"raw://127.0.0.1:{port}"))


# -- ends that die --------------------------------------------------------------------------------------------------


def test_a_publisher_that_was_killed_is_gone_within_seconds(popen):
    publisher = Publisher(popen)
    ref = publisher.publish(1).buckets[0]
    assert ref.address.startswith("raw://")
    with raw_client() as client:
        fetch(client, ref)
        publisher.kill()
        begun = time.monotonic()
        with pytest.raises(BulkGone, match="nobody listens there"):
            fetch(client, ref)
        assert time.monotonic() - begun < 3


def test_a_publisher_that_was_stopped_is_lost_within_seconds_and_serves_again_when_it_goes_on(popen):
    publisher = Publisher(popen)
    ref = publisher.publish(1).buckets[0]
    with raw_client() as client:
        fetch(client, ref)
        publisher.stop()
        with pytest.raises(BusError, match="silent"):
            fetch(client, ref, 10.0)
        publisher.process.send_signal(18)
        fetch(client, ref)


@pytest.mark.slow
def test_a_publisher_that_is_killed_at_any_moment_costs_its_version_at_most(popen):
    """The pull is whole or one typed line within seconds, and the next life's version arrives at the same reader."""
    random = np.random.default_rng(0)
    subscriber_reader = RawClient(QUICK, streams=3)
    subscriber, outcomes = WeightSubscriber(subscriber_reader, "run"), {"whole": 0, "lost": 0}
    for step in range(1, 13):
        publisher = Publisher(popen)
        manifest = publisher.publish(step)
        timer = threading.Timer(random.uniform(0, 0.03), publisher.kill)
        begun = time.monotonic()
        timer.start()
        try:
            pulled = asyncio.run(subscriber.pull(manifest, 10.0))
        except BusError:
            outcomes["lost"] += 1
        else:
            outcomes["whole"] += 1
            assert weights_digest(pulled) == manifest.digest and subscriber.newest == manifest.version
        assert time.monotonic() - begun < 5
        timer.join()
    subscriber_reader.close()
    assert outcomes["lost"], outcomes


def test_whoever_only_connects_keeps_nobody_out_who_has_a_reference(monkeypatch):
    monkeypatch.setattr(raw_server_module, "MAX_CONNECTIONS", 8)
    with store(BUDGET) as made, raw_server(made) as server, raw_client(streams=3) as client, ExitStack() as idle:
        def crowd() -> None:
            for _ in range(20):
                idle.enter_context(socket.create_connection(host_and_port(server.address)))

        crowd()
        eventually(lambda: server.statistics().get("crowded_out", 0) >= 12, "a full house")
        ref = elsewhere(made.try_put(pattern(30 * MIB), holder="a"), address=server.address)
        assert np.array_equal(fetch(client, ref), pattern(30 * MIB))
        breaks = client.statistics().get("breaks", 0)
        crowd()
        assert np.array_equal(fetch(client, ref), pattern(30 * MIB))  # over the connections that it had
        assert client.statistics().get("breaks", 0) == breaks
        assert server.statistics()["connections"] <= 8 and "turned_away" not in server.statistics()


def test_an_asker_that_is_killed_leaves_nothing_at_the_server():
    with store(BUDGET) as made, raw_server(made) as server:
        ref = elsewhere(made.try_put(pattern(32 * MIB), holder="a"), address=server.address)
        connection = RawConnection(server.address, 2.0)
        for first in range(0, 32 * MIB, 4 * MIB):
            connection.ask(wire.PLAIN, ref, first, 4 * MIB)
        eventually(lambda: made.statistics()["holds"] == 2, "the sending")
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as the kernel does
        connection.socket.close()
        eventually(lambda: server.statistics()["connections"] == 0, "the end of the connection")
        assert made.statistics()["holds"] == 1


def test_a_fetch_that_is_given_up_leaves_the_lanes_to_others():
    with store(BUDGET) as made, raw_server(made) as server, raw_client() as client:
        ref = elsewhere(made.try_put(pattern(16 * MIB), holder="a"), address=server.address)

        async def give_up_then_fetch():
            task = asyncio.ensure_future(client.fetch(ref, deadline_s=DEADLINE_S))
            await asyncio.sleep(0)
            task.cancel()
            return await client.fetch(ref, deadline_s=DEADLINE_S)

        assert np.array_equal(asyncio.run(give_up_then_fetch()), pattern(16 * MIB))


@pytest.mark.parametrize("where", ["dialling", "greeting"])
def test_a_client_that_closes_tells_who_waits_for_a_connection(monkeypatch, where):
    """Which it can not hang up, since it has none yet."""
    monkeypatch.setattr(raw_client_module, "STOP_WITHIN_S", 1.0)
    dialled = threading.Event()

    class Slow(RawConnection):
        def __init__(self, *words) -> None:
            dialled.set()
            super().__init__(*words)
            time.sleep(0.5)

    monkeypatch.setattr(raw_client_module, "RawConnection", Slow)
    patient, took = replace(QUICK, overdue_s=20.0), 0.0
    with store(BUDGET) as made, raw_client(patient, streams=4) as client, contextlib.ExitStack() as stack:
        ref = made.try_put(pattern(16 * MIB), holder="a")
        if where == "dialling":
            address = stack.enter_context(misbehaving(ref, lambda made, ask, challenge: True))
        else:
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            address = f"raw://127.0.0.1:{silent.getsockname()[1]}"

        async def close_under_it():
            task = asyncio.ensure_future(client.fetch(elsewhere(ref, address=address), deadline_s=DEADLINE_S))
            await asyncio.to_thread(dialled.wait, 10)
            nonlocal took
            begun = time.monotonic()
            await asyncio.to_thread(client.close)
            took = time.monotonic() - begun
            await asyncio.wait_for(task, 2.0)

        with pytest.raises(BulkGone, match="the reader is closed"):
            asyncio.run(close_under_it())
        assert took < 2.0, "one after the other the four lanes take four times as long"


def test_a_client_that_closes_tells_who_waits():
    with store(BUDGET) as made, raw_client(replace(QUICK, overdue_s=20.0)) as client:
        ref = made.try_put(pattern(MIB), holder="a")
        with misbehaving(ref, lambda made, ask, challenge: True) as address:
            async def close_under_it():
                task = asyncio.ensure_future(client.fetch(elsewhere(ref, address=address), deadline_s=DEADLINE_S))
                await asyncio.sleep(0.1)
                await asyncio.get_running_loop().run_in_executor(None, client.close)
                await task

            with pytest.raises(BulkGone, match="the reader is closed"):
                asyncio.run(close_under_it())
            with pytest.raises(BulkGone, match="the reader is closed"):
                fetch(client, elsewhere(ref, address=address))
