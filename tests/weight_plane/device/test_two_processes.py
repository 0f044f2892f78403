"""Versions from one process's device to another's, by groups of two and by mapped memory: whole, or one typed line."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
import weakref
from dataclasses import replace

import pytest

from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.errors import BulkGone, BusError
from cosmos_actor.weight_plane.device_pull import DevicePull
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.errors import VersionNotNewer, WeightsCorrupt
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.transports import raw_wire as wire
from cosmos_actor.weight_plane.transports.interface import TransportLost
from cosmos_actor.weight_plane.transports.raw_connection import RawConnection
from cosmos_actor.weight_plane.transports.reader import TransportReader
from tests.waiting import eventually
from tests.weight_plane.transports.tools import QUICK

torch = pytest.importorskip("torch")
from cosmos_actor.weight_plane.device_digest import weights_digest_on  # noqa: E402
from cosmos_actor.weight_plane.transports.mapped import MappedTransport  # noqa: E402
from cosmos_actor.weight_plane.transports.pair import BACKENDS, take_part  # noqa: E402
from cosmos_actor.weight_plane.transports.paired import PairTransport  # noqa: E402

from .models import torch_model  # noqa: E402
from .tools import DevicePublisherProcess, Puller  # noqa: E402

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PATIENT = replace(QUICK, overdue_s=20.0)
WAYS = {
    "gloo": ("cpu", lambda: PairTransport(QUICK, "gloo")),
    "mapped": ("cpu", lambda: MappedTransport(QUICK, "cpu")),
    "nccl": ("cuda:0", lambda: PairTransport(QUICK.__class__(), "nccl", "cuda:1")),
    "cuda_ipc": ("cuda:0", lambda: MappedTransport(QUICK.__class__(), "cuda:0")),
}


@pytest.fixture(params=["gloo", "mapped", pytest.param("nccl", marks=[pytest.mark.gpu, two_gpus]),
                        pytest.param("cuda_ipc", marks=pytest.mark.gpu)])
def way(request):
    return request.param


@pytest.fixture
def start(popen, way):
    return lambda *words: DevicePublisherProcess(popen, WAYS[way][0], *words)


@pytest.fixture
def transport(way):
    made = WAYS[way][1]()
    yield made
    made.close()


@pytest.fixture
def puller(transport):
    return Puller(transport)


def test_every_version_arrives_whole_in_memory_that_is_used_again(start, puller):
    publisher = start()
    places = set()
    for step in range(1, 6):
        manifest = publisher.publish(step)
        pulled, model = puller.pull(manifest), torch_model(step)
        assert list(pulled) == list(model) and weights_digest_on(pulled) == manifest.digest
        assert all(torch.equal(pulled[name].cpu(), model[name]) for name in model)
        assert all(tensor.device == puller.transport.device for tensor in pulled.values())
        places.add(pulled["embed"].data_ptr())
        del pulled
    assert len(places) == 1 and len(manifest.buckets) > 2
    found = puller.subscriber.statistics()
    assert (found["pulled"], found["device_pulls"], found["flats_made"]) == (5, 5, 1)
    with pytest.raises(VersionNotNewer):
        puller.pull(manifest)


def test_whoever_keeps_a_version_keeps_it(start, puller):
    publisher = start()
    first = puller.pull(publisher.publish(1))
    manifest = publisher.publish(2)
    second = puller.pull(manifest)
    assert weights_digest_on(second) == manifest.digest
    assert all(torch.equal(first[name].cpu(), tensor) for name, tensor in torch_model(1).items())


def test_a_bit_that_fell_over_on_the_device_is_seen_named_and_put_right(start, puller):
    publisher = start()
    manifest = publisher.publish(1)
    assert publisher.say("mend") == ""
    assert publisher.say("flip") not in ("", manifest.digest)
    for _ in range(2):
        with pytest.raises(WeightsCorrupt, match="tensor embed: its bytes are not those of the manifest"):
            puller.pull(manifest)
    assert puller.subscriber.newest is None
    assert publisher.say("mend") == "embed" and publisher.say("mend") == ""
    assert weights_digest_on(puller.pull(manifest)) == manifest.digest


def test_a_version_that_was_freed_is_gone_and_the_newest_is_there(start, puller):
    publisher = start()
    manifests = [publisher.publish(step) for step in (1, 2, 3)]
    with pytest.raises(BulkGone, match="the lease ended"):
        puller.pull(manifests[0])
    assert weights_digest_on(puller.pull(manifests[2])) == manifests[2].digest


def test_a_publisher_that_is_killed_in_the_midst_of_a_version_costs_one_line_and_another_serves(start, puller):
    lost, other = start(), start()
    puller.pull(lost.publish(1))
    manifest = lost.publish(2)
    assert lost.say("die 3") == "ready"
    begun = time.monotonic()
    with pytest.raises((TransportLost, BulkGone)) as caught:
        puller.pull(manifest)
    assert time.monotonic() - begun < 10 and "\n" not in str(caught.value)
    assert lost.process.wait(5) == -9
    assert puller.subscriber.newest.step == 1
    assert weights_digest_on(puller.pull(other.publish(2))) == weights_digest_on(torch_model(2))


def test_what_is_mapped_of_a_publisher_that_was_killed_is_let_go(popen):
    """Else it would keep a GPU's memory that the publisher's successor needs."""
    transport = MappedTransport(QUICK, "cpu")
    publisher = DevicePublisherProcess(popen)
    manifest = publisher.publish(1)
    Puller(transport).pull(manifest)
    talk = transport._askers[manifest.buckets[0].address]
    assert talk._mapped
    publisher.process.kill()
    until = time.monotonic() + 10
    while talk._mapped and time.monotonic() < until:
        time.sleep(0.05)
    assert not talk._mapped
    transport.close()


def test_a_bucket_that_is_gone_takes_none_of_those_asked_for_with_it_along(popen):
    """Over a connection that is there, and over one that ended unnoticed."""
    publisher, transport = DevicePublisherProcess(popen), MappedTransport(QUICK, "cpu")
    old, _, manifest = (publisher.publish(step) for step in (1, 2, 3))
    targets = [torch.zeros(ref.nbytes, dtype=torch.uint8) for ref in manifest.buckets]

    async def fetch_all():
        refs = [manifest.buckets[0], old.buckets[1], *manifest.buckets[2:]]
        return await asyncio.gather(*(transport.fetch_into(ref, target, deadline_s=20.0)
                                      for ref, target in zip(refs, targets, strict=True)), return_exceptions=True)

    for _ in range(2):
        found = asyncio.run(fetch_all())
        assert isinstance(found[1], BulkGone) and [one for one in found if one is not None] == [found[1]]
        assert targets[0].any() and not targets[1].any() and all(target.any() for target in targets[2:])
        for target in targets:
            target.zero_()
        transport._askers[manifest.buckets[0].address]._connection.socket.shutdown(socket.SHUT_RDWR)
    transport.close()


@pytest.mark.parametrize("made", [lambda: MappedTransport(PATIENT, "cpu"), lambda: PairTransport(PATIENT, "gloo")],
                         ids=["mapped", "gloo"])
def test_a_transport_that_closes_while_it_dials_tells_who_waits_and_keeps_no_memory_of_theirs(popen, made):
    ref = max(DevicePublisherProcess(popen).publish(1).buckets, key=lambda ref: ref.nbytes)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ref = replace(ref, address=f"raw://127.0.0.1:{silent.getsockname()[1]}")

        async def close_under_it():
            transport, target = made(), torch.zeros(ref.nbytes, dtype=torch.uint8)
            task = asyncio.ensure_future(transport.fetch_into(ref, target, deadline_s=60.0))
            await asyncio.sleep(0.2)
            begun = time.monotonic()
            await asyncio.to_thread(transport.close)
            with pytest.raises(TransportLost, match="the reader is closed"):
                await task
            assert time.monotonic() - begun < 4.0

        asyncio.run(close_under_it())


def test_an_asker_with_nothing_to_do_keeps_no_target(popen):
    publisher, transport = DevicePublisherProcess(popen), MappedTransport(QUICK, "cpu")
    ref = max(publisher.publish(1).buckets, key=lambda ref: ref.nbytes)
    target = torch.zeros(ref.nbytes, dtype=torch.uint8)
    kept = weakref.ref(target)
    asyncio.run(transport.fetch_into(ref, target, deadline_s=20.0))
    del target
    eventually(lambda: kept() is None, "the end of the target", within_s=5.0)
    transport.close()


def test_nobody_gets_a_byte_or_a_handle_without_the_secret_of_the_reference(start, puller):
    manifest = start().publish(1)
    forged = replace(manifest, buckets=[replace(ref, token=bytes(16)) for ref in manifest.buckets])
    with pytest.raises(BusError, match="no valid reference"):
        puller.pull(forged)
    assert puller.transport.counts["mapped"] == puller.transport.counts["groups"] == 0
    assert weights_digest_on(puller.pull(manifest)) == manifest.digest


def test_who_has_no_such_device_takes_it_as_a_plain_stream(popen):
    publisher, bulk = DevicePublisherProcess(popen), BulkReader(QUICK)
    said: list[str] = []
    reader = TransportReader(bulk, device=lambda: "", say=said.append)
    subscriber = WeightSubscriber(reader, "run", device=DevicePull(reader.to_device))
    for step in (1, 2):
        manifest = publisher.publish(step)
        pulled = asyncio.run(subscriber.pull(manifest, 20.0))
        assert weights_digest(pulled) == manifest.digest
    [line] = said
    assert line.startswith("weights come by stream: both ends are on one host, but") and "?device=GPU-1" in line
    reader.close()
    bulk.close()


READER = """
import sys
from tests.weight_plane.device.test_two_processes import WAYS
from tests.weight_plane.device.tools import Puller
from cosmos_actor.bus.schema import decode
import base64
puller = Puller(WAYS[sys.argv[1]][1]())
for line in sys.stdin:
    kept = puller.pull(decode(base64.b64decode(line), []))
    print("pulled", flush=True)
"""


def test_a_reader_that_is_killed_takes_nothing_from_the_others(popen, way, start, puller):
    publisher = start()
    reader = popen([sys.executable, "-c", READER, way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for step in (1, 2, 3, 4):
        said = publisher.say(str(step))
        if step < 3:
            reader.stdin.write(f"{said}\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == "pulled\n"
        elif step == 3:
            reader.kill()
    manifest = publisher.publish(5)
    assert weights_digest_on(puller.pull(manifest)) == manifest.digest


class Slow(MappedTransport):
    """Copies every bucket once more when the publisher has gone on: as if the first copy had taken so long."""

    def __init__(self, manifest, go_on) -> None:
        super().__init__(QUICK, "cpu")
        self.generations = {ref.generation: number for number, ref in enumerate(manifest.buckets)}
        self.go_on, self.came, self.all_came = go_on, 0, asyncio.Event()

    async def fetch_into(self, ref, target, *, deadline_s):
        await super().fetch_into(ref, target, deadline_s=deadline_s)
        self.came += 1
        if self.came == len(self.generations):
            await asyncio.to_thread(self.go_on)
            self.all_came.set()
        await self.all_came.wait()
        mapped = self._askers[ref.address]._mapped
        target.copy_(next(one for (_, bucket), one in mapped.items() if bucket == self.generations[ref.generation]))


def test_a_version_that_is_freed_while_it_is_copied_is_gone_and_not_corrupt(popen):
    publisher = DevicePublisherProcess(popen)
    manifest = publisher.publish(1)
    slow = Slow(manifest, lambda: [publisher.publish(step) for step in (2, 3)])
    with pytest.raises(BulkGone, match="the lease ended"):
        Puller(slow).pull(manifest)
    slow.close()


def test_a_version_that_is_damaged_while_it_is_copied_is_corrupt_and_not_gone(popen):
    publisher = DevicePublisherProcess(popen)
    manifest = publisher.publish(1)
    slow = Slow(manifest, lambda: publisher.say("flip"))
    with pytest.raises(WeightsCorrupt, match="tensor embed"):
        Puller(slow).pull(manifest)
    slow.close()


@pytest.mark.slow
def test_memory_of_a_version_comes_back_from_a_reader_that_stopped_in_the_midst_of_it(popen):
    """It asks for a bucket and takes no part in the broadcast; the trainer needs the memory for another version."""
    publisher = DevicePublisherProcess(popen, "cpu", 32)
    ref = max(publisher.publish(1).buckets, key=lambda ref: ref.nbytes)
    stopped = RawConnection(ref.address, 20.0)
    meeting = stopped.text(stopped.ask(wire.PAIR, ref, BACKENDS.index("gloo"), 0), ref)
    group = take_part("gloo", meeting, stopped.socket, torch.device("cpu"))
    stopped.text(stopped.ask(wire.PAIRED, ref, 0, ref.nbytes), ref)
    begun = time.monotonic()
    for step in (2, 3, 4):
        manifest = publisher.publish(step)
    assert time.monotonic() - begun < 8
    transport = PairTransport(QUICK, "gloo")
    assert weights_digest_on(Puller(transport).pull(manifest)) == manifest.digest
    transport.close()
    group.close()
    stopped.close()
