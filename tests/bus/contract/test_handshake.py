"""A peer is nobody until it introduced itself, and whoever is refused is told why, in one line and in seconds."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest

from cosmos_actor.bus import (
    AddressInUse,
    Bus,
    BusError,
    DeadlineExceeded,
    KeyFileError,
    PeerRefused,
    envelope,
    known_schemas,
)
from cosmos_actor.bus.keys import KeyRing, make_run_keys
from tests.bus.messages import Number
from tests.bus.world import World, eventually

REFUSED_WITHIN_S = 5.0


async def refusal(near: Bus, far: Bus, world: World, *, role: str = "rollout", actor: str | None = None) -> str:
    """The one line that the dialler gets; asserts that it came in time and that neither side has a link."""
    address = await far.start(world.anywhere)
    await near.start(world.anywhere)
    begin = time.monotonic()
    with pytest.raises(PeerRefused) as caught:
        await near.connect(address, role=role, actor=actor, deadline_s=20)
    assert time.monotonic() - begin < REFUSED_WITHIN_S
    assert not near.links and not far.links and not near.diallers
    line = str(caught.value)
    assert "\n" not in line and address in line
    return line


def test_another_run_is_refused(world: World) -> None:
    async def scenario(world: World) -> None:
        keys = dataclasses.replace(world.keys["controller"], run_id="run-2") if world.keys else None
        near, far = world.bus("controller", run_id="run-2", keys=keys), world.bus("rollout")
        assert "other run: we are run-1, the peer is run-2" in await refusal(near, far, world)

    world.run(scenario)


def test_another_role_than_the_wanted_one_is_refused(memory_world: World) -> None:
    async def scenario(world: World) -> None:
        near, far = world.bus("controller"), world.bus("rollout")
        assert "the peer wants policy, here is rollout" in await refusal(near, far, world, role="policy")

    memory_world.run(scenario)


def test_another_actor_than_the_wanted_one_is_refused(world: World) -> None:
    async def scenario(world: World) -> None:
        near, far = world.bus("controller"), world.bus("rollout")
        assert "the peer wants rollout-7, here is rollout-0" in await refusal(near, far, world, actor="rollout-7")

    world.run(scenario)


def test_schema_skew_is_refused_with_the_schemas_name(world: World) -> None:
    async def scenario(world: World) -> None:
        name, (version, fingerprint) = "test.number", known_schemas()["test.number"]
        newer = {**known_schemas(), name: (version + 1, fingerprint)}
        near, far = world.bus("controller", schemas=newer), world.bus("rollout")
        line = await refusal(near, far, world)
        assert "schema skew: schema test.number: we have version 1, the peer version 2" in line
        changed = {**known_schemas(), name: (version, fingerprint ^ 1)}
        near, far = world.bus("controller", "controller-1", schemas=changed), world.bus("rollout", "rollout-1")
        assert "declares other fields; raise the version" in await refusal(near, far, world)

    world.run(scenario)


def test_another_protocol_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        near, far = world.bus("controller"), world.bus("rollout")
        hello = envelope.seal_control

        def newer(kind: int, payload: Any) -> Any:
            if kind == envelope.HELLO:
                monkeypatch.setattr(envelope, "PROTOCOL", 2)
            frames = hello(kind, payload)
            monkeypatch.setattr(envelope, "PROTOCOL", 1)
            return frames

        monkeypatch.setattr("cosmos_actor.bus.dialler.seal_control", newer)
        assert "protocol version: we speak 1, the peer 2" in await refusal(near, far, world)

    world.run(scenario)


def test_a_bus_does_not_link_with_itself(world: World) -> None:
    async def scenario(world: World) -> None:
        bus = world.bus("rollout")
        address = await bus.start(world.anywhere)
        with pytest.raises(PeerRefused, match="itself"):
            await bus.connect(address, role="rollout")

    world.run(scenario)


def test_nobody_there_is_a_deadline_that_names_the_address(world: World) -> None:
    async def scenario(world: World) -> None:
        near = world.bus("controller")
        await near.start(world.anywhere)
        nowhere = "memory://nowhere" if world.kind == "memory" else "tcp://127.0.0.1:1"
        with pytest.raises(DeadlineExceeded, match="no rollout at .*nobody listens") as caught:
            await near.connect(nowhere, role="rollout", deadline_s=0.2)
        assert nowhere in str(caught.value)

    world.run(scenario)


def test_a_listener_that_comes_later_is_found(world: World) -> None:
    async def scenario(world: World) -> None:
        first, far, near = world.bus("rollout", "rollout-9"), world.bus("rollout"), world.bus("controller")
        address = await first.start(world.anywhere)
        await first.close(0)
        await near.start(world.anywhere)
        dialling = asyncio.ensure_future(near.connect(address, role="rollout", deadline_s=5))
        await asyncio.sleep(0.05)
        assert await far.start(address) == address
        assert (await dialling).actor == "rollout-0"

    world.run(scenario)


def test_before_its_hello_a_wire_can_do_nothing(world: World) -> None:
    async def scenario(world: World) -> None:
        seen: list[int] = []
        near, far, link = await world.pair(prepare=lambda bus: bus.serve(Number, lambda m, _: seen.append(m.value)))
        told: list[Any] = []

        class Stranger:
            def wire_up(self, wire: Any) -> None:
                packed = link.out.pack(Number(666), None)
                head = envelope.item_head(envelope.MESSAGE, envelope.WORK, 1, 0)
                wire.send(envelope.seal_items([head + packed.body], []))

            def wire_frames(self, wire: Any, frames: list[Any]) -> None:
                told.append(envelope.unseal(frames)[1])

            def wire_down(self, wire: Any, reason: str, refused: bool) -> None:
                told.append(reason)

        near.transport.dial(far.address, "rollout", Stranger())
        await eventually(lambda: told, "an answer")
        assert told[0] == envelope.RESET
        assert await (await link.send_work(Number(1))).result(5) is None
        assert seen == [1]

    world.run(scenario)


def test_a_busy_address_is_refused(world: World) -> None:
    async def scenario(world: World) -> None:
        first, second = world.bus("rollout"), world.bus("rollout", "rollout-1")
        address = await first.start(world.anywhere)
        with pytest.raises(AddressInUse, match="in use.*listen"):
            await second.start(address)

    world.run(scenario)


def test_a_busy_ipc_path_is_refused(zmq_world: World, tmp_path: Any) -> None:
    async def scenario(world: World) -> None:
        first, second, near = world.bus("rollout"), world.bus("rollout", "rollout-1"), world.bus("controller")
        address = await first.start(f"ipc://{tmp_path}/bus")
        with pytest.raises(AddressInUse, match="in use"):
            await second.start(address)
        await near.start(None)
        assert (await near.connect(address, role="rollout")).up

    zmq_world.run(scenario)


def test_a_wildcard_address_is_refused(zmq_world: World) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(BusError, match="name the interface"):
            await world.bus("rollout").start("tcp://0.0.0.0:0")

    zmq_world.run(scenario)


def test_two_that_dial_each_other_get_one_link(world: World) -> None:
    async def scenario(world: World) -> None:
        near, far = world.bus("controller"), world.bus("rollout")
        far.serve(Number, lambda message, link: Number(message.value + 1))
        there, here = await far.start(world.anywhere), await near.start(world.anywhere)
        await asyncio.gather(
            near.connect(there, role="rollout", actor="rollout-0"),
            far.connect(here, role="controller", actor="controller-0"),
            return_exceptions=True,
        )
        await eventually(lambda: near.links and far.links, "linked")
        assert (await near.links["rollout-0"].call(Number(1), deadline_s=5)).value == 2
        assert near.links["rollout-0"].session == far.links["controller-0"].session

    world.run(scenario)


# -- keys ----------------------------------------------------------------------------------------------------------


def test_a_key_that_is_not_on_the_list_is_refused(zmq_world: World, tmp_path: Any) -> None:
    async def scenario(world: World) -> None:
        paths = make_run_keys(tmp_path, "run-1", ["controller"])
        strangers = KeyRing.load(paths["controller"])
        keys = dataclasses.replace(strangers, peers=world.keys["controller"].peers)
        near, far = world.bus("controller", keys=keys), world.bus("rollout")
        assert "key not on the list" in await refusal(near, far, world)
        assert far.statistics()["transport"]["keys_turned_away"] >= 1

    zmq_world.run(scenario)


def test_a_wrong_server_key_is_told_apart_from_an_absent_peer(zmq_world: World) -> None:
    async def scenario(world: World) -> None:
        near, far = world.bus("controller"), world.bus("rollout")
        assert "wrong server key" in await refusal(near, far, world, role="policy")

    zmq_world.run(scenario)


def test_a_role_that_is_not_the_keys_is_refused(zmq_world: World) -> None:
    async def scenario(world: World) -> None:
        disguised = dataclasses.replace(world.keys["rollout"], role="controller")
        near, far = world.bus("controller", keys=disguised), world.bus("rollout")
        assert "the peer says controller, its key belongs to rollout" in await refusal(near, far, world)

    zmq_world.run(scenario)


def test_zeromq_without_keys_is_refused(zmq_world: World) -> None:
    async def scenario(world: World) -> None:
        from cosmos_actor.bus import Identity, ZmqTransport

        bus = Bus(Identity("run-1", "rollout", "rollout-0", "1"), ZmqTransport(), None)
        with pytest.raises(KeyFileError, match="need keys"):
            await bus.start()

    zmq_world.run(scenario)


def test_keys_of_another_run_or_role_are_refused_at_once(run_keys: dict[str, KeyRing]) -> None:
    from cosmos_actor.bus import Identity, ZmqTransport

    with pytest.raises(KeyFileError, match="belong to run run-1"):
        Bus(Identity("run-2", "rollout", "rollout-0", "1"), ZmqTransport(), run_keys["rollout"])
    with pytest.raises(KeyFileError, match="belong to role rollout"):
        Bus(Identity("run-1", "policy", "policy-0", "1"), ZmqTransport(), run_keys["rollout"])


def test_what_is_no_bus_is_a_deadline(zmq_world: World) -> None:
    async def scenario(world: World) -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        near = world.bus("controller")
        await near.start(None)
        with pytest.raises(DeadlineExceeded, match="no rollout at"):
            await near.connect(f"tcp://127.0.0.1:{port}", role="rollout", deadline_s=0.3)
        server.close()
        await near.close(0)
        await server.wait_closed()

    zmq_world.run(scenario)
