"""Whatever listens where a bus is looked for, and whatever dials one: named within 5 s, and no harm to neighbours."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import zmq

from cosmos_actor.bus import BusError, DeadlineExceeded, KeyRing, PeerRefused, make_run_keys
from tests.bus import strangers
from tests.bus.messages import Number
from tests.bus.world import World

NAMED_WITHIN_S = 5.0


async def named(world: World, address: str, deadline_s: float) -> tuple[BusError, float]:
    """What `connect` says, and after how long."""
    near = world.bus("controller")
    await near.start(None)
    begun = time.monotonic()
    with pytest.raises(BusError) as caught:
        await near.connect(address, role="rollout", deadline_s=deadline_s)
    return caught.value, time.monotonic() - begun


@pytest.mark.parametrize(("listening", "deadline_s", "kind", "words"), [
    (strangers.null_socket, 4.5, PeerRefused, ("no CURVE", "is no bus")),
    (lambda: strangers.listener(strangers.raw_bytes), 1.0, DeadlineExceeded, ("no handshake: the listener hung up",)),
    (lambda: strangers.listener(strangers.silence), 4.2, DeadlineExceeded, ("no handshake: whatever listens there",)),
    (lambda: strangers.listener(strangers.one_byte_at_a_time), 4.2, DeadlineExceeded,
     ("no handshake: whatever listens there",)),
], ids=["NULL", "raw bytes", "says nothing", "slow handshake"])
def test_a_listener_that_is_no_bus_is_named(
    zmq_world: World, listening: Callable[[], AbstractContextManager[str]], deadline_s: float, kind: type[BusError],
    words: tuple[str, ...], record_property: Callable[[str, object], None],
) -> None:
    """Two words where the kernel decides: a socket without keys may hang up before it has said so."""

    async def scenario(world: World) -> None:
        with listening() as address:
            error, seconds = await named(world, address, deadline_s)
        record_property("seconds", seconds)
        assert type(error) is kind and any(word in str(error) for word in words), error
        assert seconds < NAMED_WITHIN_S

    zmq_world.run(scenario)


def test_a_listener_with_a_wrong_key_is_named(
    zmq_world: World, tmp_path: Path, record_property: Callable[[str, object], None],
) -> None:
    async def scenario(world: World) -> None:
        others = KeyRing.load(make_run_keys(tmp_path, "run-1", ["rollout"])["rollout"])
        far = world.bus("rollout", keys=dataclasses.replace(others, peers=world.keys["rollout"].peers))
        error, seconds = await named(world, await far.start(world.anywhere), 4.5)
        record_property("seconds", seconds)
        assert isinstance(error, PeerRefused) and error.reason.startswith("wrong server key")
        assert seconds < NAMED_WITHIN_S

    zmq_world.run(scenario)


# -- the other way round -----------------------------------------------------------------------------------------------


async def until_hung_up(address: str, words: list[bytes]) -> float:
    """Dial, say the words a quarter of a second apart, and wait for the listener to hang up; seconds until then."""
    host, port = address[len("tcp://"):].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    begun = time.monotonic()

    async def speak() -> None:
        for word in words:
            writer.write(word)
            await asyncio.sleep(0.25)

    speaking = asyncio.ensure_future(speak())
    try:
        while await reader.read(4096):
            pass
    except ConnectionError:
        pass
    speaking.cancel()
    writer.close()
    return time.monotonic() - begun


async def null_dialler_refused(address: str) -> float:
    """A socket without keys; seconds until libzmq says that the handshake failed."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        begun = time.monotonic()
        dealer.connect(address)
        while not monitor.poll(0):
            await asyncio.sleep(0.01)
        seconds = time.monotonic() - begun
        dealer.disable_monitor()
        monitor.close(0)
        return seconds


SLOWLY = [bytes([byte]) for byte in b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)]


@pytest.mark.parametrize("stranger", [
    lambda address: until_hung_up(address, [b"GET / HTTP/1.1\r\nHost: bus\r\n\r\n"]),
    lambda address: until_hung_up(address, []),
    lambda address: until_hung_up(address, SLOWLY),
    null_dialler_refused,
], ids=["raw bytes", "says nothing", "slow handshake", "NULL"])
def test_a_dialler_that_is_no_bus_is_hung_up_on_and_neighbours_go_on(
    zmq_world: World, stranger: Callable[[str], asyncio.Future[float]], record_property: Callable[[str, object], None],
) -> None:
    async def scenario(world: World) -> None:
        near, far, link = await world.pair(prepare=lambda bus: bus.serve(Number, lambda message, _: message))
        waiting = asyncio.ensure_future(stranger(far.address))
        answered = 0
        while not waiting.done():
            assert (await link.call(Number(answered), deadline_s=5)).value == answered
            answered += 1
            await asyncio.sleep(0.01)
        record_property("seconds", await waiting)
        assert await waiting < NAMED_WITHIN_S
        assert list(far.links) == ["controller-0"] and link.wires_used == 1 and answered > 0
        assert far.statistics()["corrupt_frames"] == 0

    zmq_world.run(scenario)
