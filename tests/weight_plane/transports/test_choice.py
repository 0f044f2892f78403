"""Which transport is chosen for which two ends, and what is said when the one that was asked for can not serve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cosmos_actor.weight_plane.transports.choice import End, Topology, choose
from cosmos_actor.weight_plane.transports.interface import KINDS, TransportRefused

ALL = frozenset({"torch", "cuda", "nccl"})
ONE_HOST = Topology(End("here"), End("here"), "tcp://10.0.0.1:5")
TWO_HOSTS = Topology(End("here"), End("there"), "tcp://10.0.0.1:5")
ONE_GPU = Topology(End("here", "GPU-1"), End("here", "GPU-1"), "raw://10.0.0.1:5", libraries=ALL)
TWO_GPUS = Topology(End("here", "GPU-1"), End("here", "GPU-2"), "raw://10.0.0.1:5", libraries=ALL)
GPUS_OF_TWO_HOSTS = replace(TWO_GPUS, far=End("there", "GPU-2"))
UNMAPPABLE = replace(ONE_HOST, unmappable="/proc is another one")


@pytest.mark.parametrize(("topology", "transport", "reason"), [
    (ONE_HOST, "shm", "both ends are on one host"),
    (TWO_HOSTS, "stream", "two hosts; ZeroMQ from tcp://10.0.0.1:5"),
    (replace(TWO_HOSTS, address="raw://10.0.0.1:5"), "stream", "two hosts; raw TCP from raw://10.0.0.1:5"),
    (UNMAPPABLE, "stream", "on one host, but /proc is another one"),
    (ONE_GPU, "cuda_ipc", "both ends are on GPU GPU-1"),
    (replace(ONE_GPU, libraries=frozenset({"torch"})), "shm", "both ends are on GPU GPU-1"),
    (replace(ONE_GPU, unmappable="it lies on a GPU", libraries=frozenset()), "stream", "raw TCP from raw://"),
    (TWO_GPUS, "nccl", "two GPUs of one host"),
    (GPUS_OF_TWO_HOSTS, "stream", "two GPUs of two hosts"),
    (replace(TWO_GPUS, libraries=frozenset({"torch"})), "shm", "two GPUs of one host"),
    (replace(ONE_GPU, far=End("here")), "shm", "one host"),
])
def test_auto_takes_the_quickest_that_serves_and_says_why(topology, transport, reason):
    choice = choose("auto", topology)
    assert choice.transport == transport and reason in str(choice)


@pytest.mark.parametrize(("wanted", "topology", "missing"), [
    ("shm", TWO_HOSTS, "the publisher is on another host"),
    ("shm", UNMAPPABLE, "/proc is another one"),
    ("stream", replace(ONE_HOST, address=""), "it has no address"),
    ("cuda_ipc", ONE_HOST, "the two ends are not on one GPU"),
    ("cuda_ipc", TWO_GPUS, "the two ends are not on one GPU"),
    ("cuda_ipc", replace(ONE_GPU, libraries=frozenset()), "torch and cuda is missing"),
    ("nccl", ONE_HOST, "the two ends are no two GPUs"),
    ("nccl", ONE_GPU, "the two ends are no two GPUs"),
    ("nccl", replace(TWO_GPUS, libraries=frozenset({"torch"})), "cuda and nccl is missing"),
    ("nccl", replace(TWO_GPUS, address="tcp://10.0.0.1:5"), "no raw:// address"),
])
def test_one_that_can_not_serve_is_refused_by_name(wanted, topology, missing):
    with pytest.raises(TransportRefused) as caught:
        choose(wanted, topology)
    line = str(caught.value)
    assert f'weights.transport = "{wanted}"' in line and missing in line and "`weights.transport`" in line


@pytest.mark.parametrize(("wanted", "topology"), [
    ("shm", ONE_HOST), ("stream", ONE_HOST), ("stream", TWO_HOSTS), ("nccl", TWO_GPUS), ("nccl", GPUS_OF_TWO_HOSTS),
    ("cuda_ipc", ONE_GPU),
])
def test_one_that_is_asked_for_and_serves_is_taken(wanted, topology):
    assert choose(wanted, topology).transport == wanted


def test_nothing_serves():
    with pytest.raises(TransportRefused, match="no transport reaches the publisher"):
        choose("auto", replace(TWO_HOSTS, address=""))


def test_every_name_says_what_it_reaches_needs_and_costs():
    assert set(KINDS) == {"shm", "stream", "directory", "cuda_ipc", "nccl"}
    assert all(kind.reaches and kind.needs and kind.cost for kind in KINDS.values())
