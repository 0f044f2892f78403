"""The lane past the socket: whole messages, in the order of sending whichever way each took, and never a lost one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.bus import Bus, BusError, CorruptFrame, Limits
from cosmos_actor.bus.lane import HELD_MESSAGES, INLINE_BYTES, NUMBER, InTurn, LanedWire, LaneReader, LaneWriter
from cosmos_actor.bus.ring import RingReader, RingWriter
from cosmos_actor.bus.sharing import Sharing
from tests.bus.messages import Number
from tests.bus.world import World, eventually

CAPACITY = 64 * 1024


class Socket:
    """The wire's own way: it keeps what it was given."""

    name, role = "wire", None

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []

    def send(self, frames: list[Any]) -> bool:
        self.sent.append(frames)
        return True

    def close(self) -> None:
        pass


class Ends:
    def __init__(self) -> None:
        self.ring = RingWriter(CAPACITY)
        self.ring_reader = RingReader(self.ring.offer())
        self.reader = LaneReader()
        self.writer = LaneWriter(os.getpid(), self.reader.offer(), self.ring)
        self.writer.ring_open = True
        self.socket = Socket()
        self.wire = LanedWire(self.socket, self.writer)

    def read(self) -> list[list[Any]]:
        messages = self.reader.split(os.read(self.reader.offer(), CAPACITY))
        for frames in messages:
            if type(frames[0]) is tuple:
                frames[0] = self.ring_reader.take(*frames[0])
        return messages

    def close(self) -> None:
        for end in (self.writer, self.reader, self.ring_reader, self.ring):
            end.close()  # type: ignore[attr-defined]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_small_messages_lie_in_the_pipe_and_larger_ones_in_the_ring(ends: Ends) -> None:
    sent = [b"x", b"y" * INLINE_BYTES, b"z" * (INLINE_BYTES + 1)]
    assert all(ends.wire.send([data]) for data in sent)
    assert ends.read() == [[data, NUMBER.pack(index + 1)] for index, data in enumerate(sent)]
    assert ends.socket.sent == [] and ends.ring.arrays == 1


def test_what_does_not_fit_the_lane_goes_by_the_socket_with_its_number(ends: Ends) -> None:
    ends.wire.send([b"first"])
    ends.wire.send([b"two", b"frames"])
    ends.wire.send([bytes(CAPACITY + 1)])
    ends.writer.ring_open = False
    ends.wire.send([bytes(INLINE_BYTES + 1)])
    ends.wire.send([b"last"])
    assert [frames[-1] for frames in ends.socket.sent] == [NUMBER.pack(number) for number in (2, 3, 4)]
    assert [frames[1] for frames in ends.read()] == [NUMBER.pack(1), NUMBER.pack(5)]


def test_a_full_pipe_loses_nothing(ends: Ends) -> None:
    count = 1000
    for number in range(count):
        ends.wire.send([b"%4d" % number + bytes(500)])
    through_pipe = []
    while len(through_pipe) + len(ends.socket.sent) < count:
        through_pipe += ends.read()
    assert through_pipe and ends.socket.sent, "both ways were used"
    turn, seen = InTurn(), []
    for frames in [*ends.socket.sent, *through_pipe]:
        seen += [int(ready[0][:4]) for ready in turn.take(frames)]
    assert seen == list(range(count))


def test_a_pipe_that_nobody_reads_any_more_takes_nothing(ends: Ends) -> None:
    reader, ends.reader = ends.reader, LaneReader()
    reader.close()
    assert ends.wire.send([b"x"])
    assert ends.socket.sent == [[b"x", NUMBER.pack(1)]]


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20), st.lists(st.integers(1, 400), max_size=20))
def test_records_are_whole_however_they_are_read(messages: list[bytes], cuts: list[int]) -> None:
    ends = Ends()
    for message in messages:
        assert ends.wire.send([message])
    data, found = os.read(ends.reader.offer(), CAPACITY), []
    for size in [*cuts, len(data)]:
        found += ends.reader.split(data[:size])
        data = data[size:]
    assert [frames[0] for frames in found] == messages
    ends.close()


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.randoms())
def test_two_ways_give_one_order(by_lane: list[bool], random: Any) -> None:
    ways: tuple[list[int], list[int]] = ([], [])
    for number, lane in enumerate(by_lane, 1):
        ways[lane].append(number)
    turn, seen = InTurn(), []
    while any(ways):
        way = random.choice([way for way in ways if way])
        number = way.pop(0)
        seen += [int(frames[0]) for frames in turn.take([b"%d" % number, NUMBER.pack(number)])]
    assert seen == list(range(1, len(by_lane) + 1))


def test_a_message_without_a_number_waits_for_nobody() -> None:
    turn = InTurn()
    assert turn.take([b"later", NUMBER.pack(2)]) == ()
    assert turn.take([b"a control message"]) == ([b"a control message"],)


def test_numbers_that_can_not_be_are_corrupt() -> None:
    turn = InTurn()
    turn.take([b"", NUMBER.pack(1)])
    with pytest.raises(CorruptFrame, match="came where 2 was next"):
        turn.take([b"", NUMBER.pack(1)])
    assert turn.take([b"", NUMBER.pack(2 + HELD_MESSAGES)]) == ()
    with pytest.raises(CorruptFrame):
        turn.take([b"", NUMBER.pack(3 + HELD_MESSAGES)])


def test_what_is_no_pipe_is_not_opened(ends: Ends, tmp_path: Any) -> None:
    with open(tmp_path / "file", "w") as file:
        for pid, fd in ((os.getpid(), file.fileno()), (os.getpid(), 9999), (2**22 - 1, 0)):
            with pytest.raises(BusError):
                LaneWriter(pid, fd, ends.ring)


def test_nothing_is_kept_for_a_peer_on_another_host() -> None:
    near, far = Sharing(CAPACITY), Sharing(CAPACITY)
    near.accept(far.offer(), "another host")
    assert near.writer is None and near.reader is None and near.offer() is None
    wire = Socket()
    assert near.carry(wire) is wire
    far.close()


def served(bus: Bus) -> None:
    bus.serve(Number, lambda message, link: Number(message.value + 1))


def test_two_processes_of_a_host_use_it_and_do_without_it(zmq_world: World) -> None:
    """Every call is answered: through the lane, after our end of it was closed, and with nothing shared at all."""

    async def scenario(world: World) -> None:
        _, _, link = await world.pair(prepare=served)
        await link.call(Number(0), deadline_s=5)
        before = link.sharing.statistics()["lane_messages"]
        for value in range(10):
            assert (await link.call(Number(value), deadline_s=5)).value == value + 1
        assert link.sharing.statistics()["lane_messages"] >= before + 10
        os.close(link.sharing._lane_out._fd)
        link.sharing._lane_out._fd = os.open(os.devnull, os.O_RDONLY)  # takes no more writes
        for value in range(10):
            assert (await link.call(Number(value), deadline_s=5)).value == value + 1
        assert link.sharing.statistics()["lane_messages"] < before + 21

    zmq_world.run(scenario)


def test_without_shared_memory_there_is_no_lane(zmq_world: World) -> None:
    async def scenario(world: World) -> None:
        _, _, link = await world.pair(prepare=served, limits=Limits(shared_bytes=0))
        assert (await link.call(Number(1), deadline_s=5)).value == 2
        assert link.sharing.statistics() == {"lane_messages": 0, "ring_arrays": 0}

    zmq_world.run(scenario)


def test_garbage_in_the_pipe_resets_the_wire_and_loses_nothing(zmq_world: World) -> None:
    async def scenario(world: World) -> None:
        near, far, link = await world.pair(prepare=served)
        await link.call(Number(0), deadline_s=5)
        receipts = [await link.send_work(Number(value)) for value in range(20)]
        os.write(link.sharing._lane_out._fd, os.urandom(8) + b"\xff" * 12 + b"garbage" * 9)
        receipts += [await link.send_work(Number(value)) for value in range(20, 40)]
        assert [(await receipt.result(5)).value for receipt in receipts] == list(range(1, 41))
        await eventually(lambda: link.wires_used == 2, "a second wire")
        assert near.statistics()["corrupt_frames"] + far.statistics()["corrupt_frames"] == 1

    zmq_world.run(scenario)


def test_no_descriptor_is_left_behind(zmq_world: World) -> None:
    async def scenario(world: World) -> None:
        near, _, link = await world.pair(prepare=served)
        await link.call(Number(0), deadline_s=5)
        first = len(os.listdir("/proc/self/fd"))
        for wires in range(2, 7):
            world.cut(near)
            await eventually(lambda wires=wires: link.wires_used == wires, "a new wire")
            await link.call(Number(0), deadline_s=5)
        await asyncio.sleep(0.2)
        assert len(os.listdir("/proc/self/fd")) <= first + 2

    zmq_world.run(scenario)


def test_what_still_comes_for_a_link_that_is_over_is_late_not_corrupt(zmq_world: World) -> None:
    """The listener has given the peer up; what that had sent past its lane carries a number, as always."""

    async def scenario(world: World) -> None:
        _, far, link = await world.pair(prepare=served)
        await link.call(Number(0), deadline_s=5)
        os.close(link.sharing._lane_out._fd)
        link.sharing._lane_out._fd = os.open(os.devnull, os.O_RDONLY)  # takes no more writes
        late = asyncio.ensure_future(link.call(Number(1), deadline_s=5))
        far.link_over(far.links["controller-0"], "no frame for 10 s")
        with pytest.raises(BusError, match="stale|no frame"):
            await late
        assert far.statistics()["corrupt_frames"] == 0

    zmq_world.run(scenario)
