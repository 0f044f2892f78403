"""Streams over real sockets on one machine: the arena is declared unreachable, all else is as between two hosts."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq

from cosmos_actor.bus.bulk.connection import Connection
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.errors import AddressInUse, BulkCorrupt, BulkGone, DeadlineExceeded, PeerRefused
from cosmos_actor.bus.keys import KeyRing, make_run_keys
from tests.bulk.tools import elsewhere, pattern, reader, served, store
from tests.waiting import eventually

QUICK = BulkSettings(chunk_bytes=MIB, lost_s=0.3)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KeyRing]:
    folder = tmp_path_factory.mktemp("keys")
    return {role: KeyRing.load(path) for role, path in make_run_keys(folder, "run", ["rollout", "policy"]).items()}


@pytest.mark.parametrize("array", [
    pattern(5 * MIB + 17), pattern(2 * MIB), pattern(3), np.zeros((0, 4), np.float32), np.float64(2.5),
    pattern(12 * MIB).view(np.float32).reshape(3, -1, 2),
], ids=["odd", "whole chunks", "three bytes", "empty", "scalar", "three dims"])
def test_an_array_arrives_as_it_was_put_with_curve_below(array: np.ndarray, keys: dict[str, KeyRing]) -> None:
    async def main() -> None:
        with store(16 * MIB) as made, served(made, keys["rollout"]), reader(keys=keys["policy"]) as there:
            ref = elsewhere(made.try_put(array, holder="policy-0", digest=True))
            assert not there.is_local(ref)
            found = await there.fetch(ref, deadline_s=20.0, verify=True)
            np.testing.assert_array_equal(found, array)
            assert found.dtype == array.dtype and not found.flags.writeable

    asyncio.run(main())


def test_many_fetches_at_once_all_arrive_and_never_more_streams_run_than_are_set() -> None:
    async def main() -> None:
        with store(16 * MIB) as made, served(made), reader(replace(QUICK, streams=2)) as there:
            arrays = [pattern(MIB + n) for n in range(9)]
            refs = [elsewhere(made.try_put(array, holder="a")) for array in arrays]
            found = await asyncio.gather(*(there.fetch(ref, deadline_s=30.0) for ref in refs))
            for number, array in enumerate(arrays):
                np.testing.assert_array_equal(found[number], array)
            assert there.statistics()["streams"]["connections"] == 1
            assert there.statistics()["streams"]["done"] == 9

    asyncio.run(main())


def test_an_ended_lease_is_gone_and_not_other_bytes() -> None:
    async def main() -> None:
        with store() as made, served(made), reader() as there:
            ref = elsewhere(made.try_put(pattern(MIB), holder="a"))
            made.release(ref, "a")
            made.try_put(np.zeros(MIB, np.uint8), holder="a")
            with pytest.raises(BulkGone, match=r"array 1 of rollout-0/.*the lease ended"):
                await there.fetch(ref, deadline_s=20.0)

    asyncio.run(main())


def test_a_lease_that_ends_in_the_middle_of_a_stream_is_gone() -> None:
    async def main() -> None:
        with store(16 * MIB) as made, served(made) as server, reader(replace(QUICK, window_chunks=1)) as there:
            ref = elsewhere(made.try_put(pattern(8 * MIB), holder="a"))
            answer = server.answer
            server.answer = lambda frames: (made.release(ref, "a") if server.statistics()["chunks"] == 3 else None,
                                            answer(frames))[1]
            with pytest.raises(BulkGone, match="the lease ended"):
                await there.fetch(ref, deadline_s=20.0)

    asyncio.run(main())


@pytest.mark.parametrize("lie", [{"token": bytes(16)}, {"generation": 2}])
def test_without_the_token_of_the_reference_there_is_no_byte(lie: dict) -> None:
    async def main() -> None:
        with store() as made, served(made) as server, reader() as there:
            ref = made.try_put(pattern(MIB), holder="a")
            made.try_put(pattern(MIB), holder="a")
            with pytest.raises(BulkGone, match="no valid reference"):
                await there.fetch(elsewhere(ref, **lie), deadline_s=20.0)
            assert server.statistics()["chunk_bytes"] == 0

    asyncio.run(main())


def test_an_owner_that_was_started_anew_says_so() -> None:
    async def main() -> None:
        with store() as old, store() as new, served(new), reader() as there:
            ref = elsewhere(old.try_put(pattern(MIB), holder="a"), address=new.address)
            with pytest.raises(BulkGone, match="started anew"):
                await there.fetch(ref, deadline_s=20.0)

    asyncio.run(main())


def test_a_flipped_byte_is_asked_for_again_and_an_obstinate_one_is_named() -> None:
    async def main() -> None:
        with store(8 * MIB) as made, served(made) as server, reader() as there:
            ref = elsewhere(made.try_put(pattern(4 * MIB), holder="a"))
            damage(server, times=2)
            np.testing.assert_array_equal(await there.fetch(ref, deadline_s=20.0), pattern(4 * MIB))
            assert there.statistics()["streams"]["damaged"] == 2
            damage(server, times=99)
            with pytest.raises(BulkCorrupt, match=r"chunk \d has another digest, 3 times; \d of 4 chunks of array 1"):
                await there.fetch(ref, deadline_s=20.0)

    asyncio.run(main())


def damage(server, *, times: int, cut: int = 0) -> None:
    """The next `times` answers have a byte flipped, or (`cut`) end early."""
    answer, left = type(server).answer, [times]

    def wrong(frames: list) -> list:
        head, payload = answer(server, frames)
        if left[0] > 0:
            left[0] -= 1
            payload = bytearray(payload)
            payload[len(payload) // 2] ^= 1
            payload = payload[:len(payload) - cut]
        return [head, bytes(payload)]

    server.answer = wrong


def test_a_truncated_chunk_is_a_damaged_chunk() -> None:
    async def main() -> None:
        with store() as made, served(made) as server, reader() as there:
            ref = elsewhere(made.try_put(pattern(2 * MIB), holder="a"))
            damage(server, times=1, cut=1000)
            np.testing.assert_array_equal(await there.fetch(ref, deadline_s=20.0), pattern(2 * MIB))

    asyncio.run(main())


def test_a_lost_chunk_is_asked_for_again() -> None:
    async def main() -> None:
        with store() as made, served(made) as server, reader(replace(QUICK, overdue_s=0.2)) as there:
            ref = elsewhere(made.try_put(pattern(3 * MIB), holder="a"))
            send, lost = server._send, []
            server._send = lambda frames: send(frames) if len(lost) == 2 else lost.append(frames)
            np.testing.assert_array_equal(await there.fetch(ref, deadline_s=20.0), pattern(3 * MIB))
            assert there.statistics()["streams"]["asked_again"] >= 2

    asyncio.run(main())


def test_a_peer_that_stops_in_the_middle_is_named_with_the_progress_when_the_time_is_up() -> None:
    async def main() -> None:
        with store(8 * MIB) as made, served(made) as server, reader(replace(QUICK, window_chunks=1)) as there:
            ref = elsewhere(made.try_put(pattern(4 * MIB), holder="a"))
            send = server._send
            server._send = lambda frames: send(frames) if server.statistics()["chunks"] <= 3 else None
            with pytest.raises(DeadlineExceeded, match=r"3 of 4 chunks of array 1 of rollout-0/.* within 0.5 s .*bulk"):
                await there.fetch(ref, deadline_s=0.5)
            server._send = send
            np.testing.assert_array_equal(await there.fetch(ref, deadline_s=20.0), pattern(4 * MIB))

    asyncio.run(main())


def test_a_stream_whose_chunks_stop_ends_after_the_silence_that_was_allowed_and_a_slow_one_does_not() -> None:
    async def main(pause_s: float, stops_after: int) -> None:
        with store(16 * MIB) as made, served(made) as server, reader(replace(QUICK, window_chunks=1)) as there:
            ref = elsewhere(made.try_put(pattern(6 * MIB), holder="a"))
            answer, stopped = server.answer, threading.Event()

            def answer_late(frames):
                stopped.wait(pause_s if server.statistics()["chunks"] < stops_after else 60.0)
                return answer(frames)

            server.answer = answer_late
            try:
                await there.fetch(ref, deadline_s=20.0, silent_s=0.5)
            finally:
                stopped.set()

    asyncio.run(main(pause_s=0.15, stops_after=6))
    with pytest.raises(DeadlineExceeded, match=r"2 of 6 chunks of array 1 .* and nothing more for 0.5 s"):
        asyncio.run(main(pause_s=0.0, stops_after=2))


def test_an_owner_that_is_not_there_is_gone_long_before_the_deadline() -> None:
    async def main() -> None:
        with store() as made, reader(QUICK) as there:
            with served(made):
                ref = elsewhere(made.try_put(pattern(MIB), holder="a"))
            with pytest.raises(BulkGone, match=r"0 of 1 chunks.*server at tcp://.* is gone: nobody listens"):
                await asyncio.wait_for(there.fetch(ref, deadline_s=3600.0), 20.0)
            eventually(lambda: there.statistics()["streams"]["connections"] == 0, "the end of dialling")

    asyncio.run(main())


def test_a_port_that_a_firewall_drops_is_named_with_its_address_and_settings_long_before_the_deadline() -> None:
    """A listener whose queue is full drops what knocks, without a word, as a firewall does."""

    async def main(listener: socket.socket) -> None:
        with store() as made, reader(QUICK) as there:
            address = "tcp://127.0.0.1:{}".format(listener.getsockname()[1])
            ref = replace(elsewhere(made.try_put(pattern(MIB), holder="a")), address=address)
            said = (r"0 of 1 chunks of array 1 .*; nothing at " + address + r" has answered for 0.3 s \(bulk.lost_s\): "
                    r"a firewall drops what is sent there, .*peer \S+, channel bulk, setting `bus.host`")
            with pytest.raises(BulkGone, match=said):
                await asyncio.wait_for(there.fetch(ref, deadline_s=3600.0), 20.0)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(listener.getsockname())
            asyncio.run(main(listener))
        finally:
            for one in waiting:
                one.close()


def test_word_that_the_owner_is_gone_ends_its_streams_at_once() -> None:
    async def main() -> None:
        with store() as made, served(made) as server, reader() as there:
            ref = elsewhere(made.try_put(pattern(MIB), holder="a"))
            asked = threading.Event()
            server.answer = lambda frames: (asked.set(), [])[1]
            fetch = asyncio.ensure_future(there.fetch(ref, deadline_s=3600.0))
            assert await asyncio.get_running_loop().run_in_executor(None, asked.wait, 20.0)
            there.forget(ref.owner, "another life")
            there.forget(ref.owner, ref.incarnation)
            with pytest.raises(BulkGone, match="0 of 1 chunks.*the owner is gone"):
                await asyncio.wait_for(fetch, 20.0)
            eventually(lambda: there.statistics()["streams"]["connections"] == 0, "the end of the connection")

    asyncio.run(main())


def test_a_cancelled_fetch_frees_its_stream() -> None:
    async def main() -> None:
        with store() as made, served(made) as server, reader(replace(QUICK, streams=1)) as there:
            ref = elsewhere(made.try_put(pattern(MIB), holder="a"))
            answer, asked = server.answer, threading.Event()
            server.answer = lambda frames: (asked.set(), [])[1]
            first = asyncio.ensure_future(there.fetch(ref, deadline_s=3600.0))
            assert await asyncio.get_running_loop().run_in_executor(None, asked.wait, 20.0)
            server.answer = answer
            first.cancel()
            await there.fetch(ref, deadline_s=20.0)

    asyncio.run(main())


def test_closing_the_reader_ends_what_waits() -> None:
    async def main() -> None:
        with store() as made, served(made) as server, reader() as there:
            ref = elsewhere(made.try_put(pattern(MIB), holder="a"))
            server.answer = lambda frames: []
            fetch = asyncio.ensure_future(there.fetch(ref, deadline_s=3600.0))
            await asyncio.sleep(0)
            there.close()
            with pytest.raises(BulkGone, match="reader is closed"):
                await asyncio.wait_for(fetch, 20.0)
            with pytest.raises(BulkGone, match="reader is closed"):
                await there.fetch(ref, deadline_s=1.0)

    asyncio.run(main())


def test_a_stranger_and_a_wrong_owner_are_refused_in_seconds(tmp_path: Path, keys: dict[str, KeyRing]) -> None:
    strangers = make_run_keys(tmp_path, "run", ["rollout", "policy"])
    stranger = KeyRing.load(strangers["policy"])

    async def main() -> None:
        with store() as made, served(made, keys["rollout"]) as server:
            ref = elsewhere(made.try_put(pattern(MIB), holder="a"))
            with reader(keys=replace(stranger, peers=keys["policy"].peers)) as there:
                with pytest.raises(PeerRefused, match="our key is not on its list.*rollout-0"):
                    await there.fetch(ref, deadline_s=5.0)
            with reader(keys=stranger) as there, pytest.raises(PeerRefused, match="does not hold the key of its role"):
                await there.fetch(ref, deadline_s=5.0)
            assert server.statistics()["asks"] == 0

    asyncio.run(main())


def test_with_encryption_off_the_keyed_digests_still_guard_every_byte(keys: dict[str, KeyRing]) -> None:
    plain = replace(QUICK, encrypt=False)

    async def main() -> None:
        with store(settings=plain) as made, served(made, keys["rollout"]) as server, \
                reader(plain, keys["policy"]) as there:
            ref = elsewhere(made.try_put(pattern(2 * MIB), holder="a"))
            np.testing.assert_array_equal(await there.fetch(ref, deadline_s=20.0), pattern(2 * MIB))
            damage(server, times=99)
            with pytest.raises(BulkCorrupt):
                await there.fetch(ref, deadline_s=20.0)
            with reader(keys=keys["policy"]) as other, pytest.raises(PeerRefused, match="`bulk.encrypt` off"):
                await other.fetch(ref, deadline_s=5.0)

    asyncio.run(main())


def test_garbage_at_the_door_harms_nobody() -> None:
    import zmq

    async def main() -> None:
        with store() as made, served(made) as server, reader() as there:
            ref = elsewhere(made.try_put(pattern(MIB), holder="a"))
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.connect(made.address)
                for garbage in ([b""], [b"\xff" * 100], [b"", b""], [b"\x97\x01"], [b"\x87" * 9]):
                    stranger.send_multipart(garbage)
                stranger.send(bytes(1 << 20))
                np.testing.assert_array_equal(await there.fetch(ref, deadline_s=20.0), pattern(MIB))
                stranger.close(0)
            assert server.statistics()["damaged_asks"] <= 5

    asyncio.run(main())


def test_an_address_in_use_is_one_line_and_leaves_nothing() -> None:
    with store() as made, served(made), store() as other, pytest.raises(AddressInUse, match="is in use"), \
            served(other, listen=made.address):
        pass


def test_a_handshake_that_fails_once_is_tried_again_and_only_a_second_time_in_a_row_is_a_refusal():
    """One flipped bit on the way looks like a wrong key."""
    connection = Connection(None, "tcp://127.0.0.1:1", None, None, now=0.0)
    for event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED,
                  zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_DISCONNECTED):
        connection._follow(event, 1.0)
        assert connection.refusal is None
    connection._follow(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 2.0)
    assert "does not hold the key" in connection.refusal
