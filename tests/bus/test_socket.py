"""Sockets are made in one file, with every option set by name; the limits of the process are looked at first."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import cosmos_actor
from cosmos_actor.bus import AddressInUse, BusError, DescriptorLimit, Limits
from cosmos_actor.bus import socket as sockets

BUS = Path(cosmos_actor.__file__).parent / "bus"


@pytest.fixture
def context() -> Iterator[Any]:
    made = sockets.make_context()
    yield made
    made.destroy(linger=0)


def test_options_that_libzmq_gets_wrong_by_default(context: Any) -> None:
    dealer, router = sockets.make_dealer(context, None, None, b"me", 1000), sockets.make_router(context, None, 1000)
    for made in (dealer, router):
        assert made.getsockopt(zmq.LINGER) == 0
        assert made.getsockopt(zmq.SNDHWM) == 0 and made.getsockopt(zmq.RCVHWM) > 0
        assert made.getsockopt(zmq.MAXMSGSIZE) == 1000
        assert made.getsockopt(zmq.HANDSHAKE_IVL) < 5000
        assert made.getsockopt(zmq.HEARTBEAT_IVL) > 0 and made.getsockopt(zmq.TCP_KEEPALIVE) == 1
    assert dealer.getsockopt(zmq.IMMEDIATE) == 1 and dealer.getsockopt(zmq.RECONNECT_IVL) == -1


def test_only_one_file_makes_contexts_and_sockets() -> None:
    maker = re.compile(r"zmq\.Context|\.socket\(|Context\(|\.set\(zmq|setsockopt\(")
    makers = {path.name for path in BUS.rglob("*.py") if maker.search(path.read_text())}
    assert makers <= {"socket.py"}


def test_too_few_descriptors_are_an_error_that_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    with pytest.raises(DescriptorLimit, match="only 256 file descriptors allowed, 512 wanted.*bus.min_descriptors"):
        sockets.check_descriptors(512)
    assert sockets.check_descriptors(256) == 256


def test_the_soft_limit_is_raised_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    assert sockets.check_descriptors(512) == 4096 and raised == [(4096, 4096)]


def test_an_address_that_can_not_be_bound_is_one_line(context: Any) -> None:
    with pytest.raises(BusError, match="can not listen at tcp://192.0.2.1:0"):
        sockets.bind(sockets.make_router(context, None, 1000), "tcp://192.0.2.1:0")


def test_a_reserved_address_is_served_by_one_process_after_the_other(context: Any) -> None:
    """Each gets a copy of the descriptor, as a child process does; who dials between two of them waits."""
    listener, address = sockets.reserve("tcp://127.0.0.1:0")
    with listener:
        for number in (b"1", b"2"):
            dealer = sockets.make_dealer(context, None, None, b"dealer" + number, 1000)
            dealer.connect(address)
            process = zmq.Context()
            router = sockets.make_router(process, None, 1000)
            assert sockets.bind(router, address, os.dup(listener.fileno())) == address
            assert dealer.poll(5000, zmq.POLLOUT)
            dealer.send(b"hello")
            assert router.poll(5000) and router.recv_multipart() == [b"dealer" + number, b"hello"]
            with pytest.raises(AddressInUse, match="is in use: choose another port"):
                sockets.reserve(address)
            dealer.close(0)
            router.close(0)
            process.term()  # waits until nobody accepts for it any more, as the end of a process does


@pytest.mark.parametrize(("address", "line"), [
    ("tcp://192.0.2.1:0", "can not listen at tcp://192.0.2.1:0"), ("tcp://0.0.0.0:0", "name the interface's address"),
    ("tcp://no.such.host.invalid:0", "can not listen at tcp://no.such.host.invalid:0: "),
])
def test_an_address_that_can_not_be_reserved_is_one_line(address: str, line: str) -> None:
    with pytest.raises(BusError, match=line) as caught:
        sockets.reserve(address)
    assert "listen" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"lost_after_s": 0}, "lost_after_s must be above 0"),
        ({"lost_after_s": 1.5}, "at least two heartbeats"),
        ({"work_window_bytes": 1000}, "holds no whole message"),
        ({"batch_messages": -1}, "batch_messages must be above 0"),
    ],
)
def test_limits_that_can_not_work_are_refused_by_name(values: dict[str, Any], line: str) -> None:
    with pytest.raises(BusError, match=line) as caught:
        Limits(**values)
    assert f"bus.{next(iter(values))}" in str(caught.value)
