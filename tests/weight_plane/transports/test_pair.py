"""Groups of two, over Gloo: bytes arrive, and a member that is lost costs one typed line in time and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from cosmos_actor.bus.errors import BulkGone, BusError, DeadlineExceeded
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.transports.interface import TransportLost
from tests.weight_plane.models import large_model

from .tools import DEADLINE_S, QUICK, Publisher

torch = pytest.importorskip("torch")
from cosmos_actor.weight_plane.transports import pair  # noqa: E402
from cosmos_actor.weight_plane.transports.pair import gone  # noqa: E402
from cosmos_actor.weight_plane.transports.paired import PairTransport  # noqa: E402


@pytest.fixture
def publisher(popen):
    return Publisher(popen, "cpu")


@pytest.fixture
def transport():
    made = PairTransport(QUICK, "gloo")
    yield made
    made.close()


def pull(reader, *manifests):
    subscriber = WeightSubscriber(reader, "run")

    async def all_of_them():
        return [await subscriber.pull(manifest, DEADLINE_S) for manifest in manifests]

    return asyncio.run(all_of_them())


def fetch(transport, ref, deadline_s=DEADLINE_S):
    return asyncio.run(transport.fetch(ref, deadline_s=deadline_s))


def test_versions_arrive_whole_through_one_group_and_torch_s_default_group_is_not_touched(publisher, transport):
    manifests = [publisher.publish(step) for step in (1, 2)]
    for pulled, manifest in zip(pull(transport, *manifests), manifests, strict=True):
        assert weights_digest(pulled) == manifest.digest
    assert transport.statistics()["groups"] == 1 and transport.statistics()["taken"] == 12
    assert not torch.distributed.is_initialized()


def test_a_version_that_was_freed_is_gone_and_the_group_lives_on(publisher, transport):
    manifests = [publisher.publish(step) for step in (1, 2, 3)]
    fetch(transport, manifests[2].buckets[0])
    with pytest.raises(BulkGone, match="the lease ended"):
        fetch(transport, manifests[0].buckets[0])
    assert len(fetch(transport, manifests[2].buckets[1]))
    assert transport.statistics()["groups"] == 1


@pytest.mark.parametrize("end", [Publisher.kill, pytest.param(Publisher.stop, marks=pytest.mark.slow)])
def test_a_publisher_that_is_lost_costs_one_line_in_time_and_another_group_serves(popen, transport, end):
    lost, other = Publisher(popen, "cpu"), Publisher(popen, "cpu")
    manifest, from_other = lost.publish(1), other.publish(1)
    fetch(transport, manifest.buckets[0])
    end(lost)
    begun = time.monotonic()
    with pytest.raises(TransportLost, match="did not come by gloo while"):
        fetch(transport, manifest.buckets[1])
    assert time.monotonic() - begun < 5
    assert pull(transport, from_other)


@pytest.mark.slow
def test_the_deadline_holds_against_a_publisher_that_stopped(publisher):
    transport = PairTransport(QUICK.__class__(overdue_s=30.0), "gloo")
    with contextlib.closing(transport):
        manifest = publisher.publish(1)
        fetch(transport, manifest.buckets[0])
        publisher.stop()
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="silent"):
            fetch(transport, manifest.buckets[1], 0.5)
        assert time.monotonic() - begun < 2
        publisher.process.send_signal(signal.SIGCONT)
        fetch(transport, manifest.buckets[1])


TAKER = """
import asyncio, sys
from cosmos_actor.bus.schema import decode
from cosmos_actor.weight_plane.transports.paired import PairTransport
from tests.weight_plane.transports.test_pair import fetch
from tests.weight_plane.transports.tools import QUICK
import base64
transport = PairTransport(QUICK, "gloo")
refs = decode(base64.b64decode(sys.stdin.readline()), []).buckets
fetch(transport, refs[0])
print("taken", flush=True)
sys.stdin.readline()
try:
    fetch(transport, refs[1])
except Exception as error:
    print(type(error).__name__, flush=True)
"""


class Taker:
    """A reader in a process of its own; it takes one bucket, and another when told."""

    def __init__(self, popen, manifest) -> None:
        import base64

        from cosmos_actor.bus.schema import encode

        self.process = popen([sys.executable, "-c", TAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.say(base64.b64encode(encode(manifest)[0]).decode())
        assert self.process.stdout.readline() == "taken\n"

    def say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_is_lost_takes_nothing_from_the_others(popen, publisher, transport, number):
    manifest = publisher.publish(1)
    taker = Taker(popen, manifest)
    fetch(transport, manifest.buckets[0])
    taker.process.send_signal(number)
    pulled = pull(transport, manifest, publisher.publish(2))
    assert all(np.array_equal(pulled[1][name], tensor) for name, tensor in large_model(2).items())


@pytest.mark.slow
@pytest.mark.parametrize("end", [Publisher.kill, Publisher.stop])
def test_a_process_whose_other_member_is_lost_still_ends(popen, publisher, end):
    taker = Taker(popen, publisher.publish(1))
    end(publisher)
    taker.say("go on")
    assert taker.process.stdout.readline() == "TransportLost\n"
    assert taker.process.wait(10) == 0


def test_a_publisher_that_gives_by_streams_only_says_so(popen, transport):
    with pytest.raises(BusError, match="by streams only"):
        fetch(transport, Publisher(popen).publish(1).buckets[0])


def test_who_hung_up_behind_asks_that_were_not_read_is_gone():
    near, far = socket.socketpair()
    assert not gone(near)
    far.sendall(b"an ask")
    assert not gone(near)
    far.close()
    assert gone(near)
    near.close()
    assert gone(near)


def test_a_group_whose_other_end_is_lost_is_not_waited_for():
    begun = time.monotonic()
    with pytest.raises(TransportLost, match="a group was not made: the other end is gone"):
        pair._within(20.0, "a group", lambda: time.sleep(3), lambda: time.monotonic() > begun + 0.2)
    assert time.monotonic() - begun < 2


def test_a_backend_that_is_not_there_is_named(publisher):
    with contextlib.closing(PairTransport(QUICK, "nccl")) as transport, pytest.raises(BusError, match="nccl"):
        fetch(transport, publisher.publish(1).buckets[0])


# -- two GPUs, by hand: `pytest -m gpu tests/weight_plane/transports` -------------------------------------------------


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def nccl():
    made = PairTransport(QUICK.__class__(), "nccl", "cuda:1")
    yield made
    made.close()


@pytest.mark.gpu
@needs_two_gpus
def test_versions_arrive_on_another_gpu(popen, nccl):
    publisher = Publisher(popen, "cuda:0")
    for step in (1, 2):
        manifest = publisher.publish(step)
        tensor = asyncio.run(nccl.fetch_tensor(manifest.buckets[0], deadline_s=60.0))
        assert str(tensor.device) == "cuda:1" and tensor.nbytes == manifest.buckets[0].nbytes
        assert weights_digest(pull(nccl, manifest)[0]) == manifest.digest
    assert nccl.statistics()["groups"] == 1


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("end", [Publisher.kill, Publisher.stop])
def test_a_publisher_on_another_gpu_that_is_lost_costs_one_line_and_another_serves(popen, nccl, end):
    lost, other = Publisher(popen, "cuda:0"), Publisher(popen, "cuda:0")
    manifest, from_other = lost.publish(1), other.publish(1)
    fetch(nccl, manifest.buckets[0], 60.0)
    end(lost)
    begun = time.monotonic()
    with pytest.raises(TransportLost, match="did not come by nccl while"):
        fetch(nccl, manifest.buckets[1], 60.0)
    assert time.monotonic() - begun < 20
    assert pull(nccl, from_other)
