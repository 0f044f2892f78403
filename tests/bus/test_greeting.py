"""What a listener's first bytes say, read from bytes and from real sockets."""

from __future__ import annotations

import socket

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.bus.errors import CorruptFrame
from cosmos_actor.bus.greeting import GREETING_BYTES, OPENING, Greeting, read_greeting


def greeting(mechanism: bytes = b"CURVE", *, version: bytes = b"\x03\x01") -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize("mechanism", ["NULL", "PLAIN", "CURVE", "GSSAPI"])
def test_a_whole_greeting_says_version_and_mechanism(mechanism: str) -> None:
    assert read_greeting(greeting(mechanism.encode())) == Greeting((3, 1), mechanism)
    assert read_greeting(greeting(mechanism.encode()) + b"more") == Greeting((3, 1), mechanism)


@pytest.mark.parametrize("size", range(GREETING_BYTES))
def test_a_part_of_one_is_waited_for(size: int) -> None:
    assert read_greeting(greeting()[:size]) is None


def test_versions_without_mechanisms_need_no_more_than_their_number() -> None:
    assert read_greeting(greeting(version=b"\x01\x00")[:11]) == Greeting((2, 0), "")


@pytest.mark.parametrize(("data", "words"), [
    (b"HTTP/1.1 400 Bad Request\r\n", "HTTP, it begins with b'HTTP/1.1 400 Bad'"),
    (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH"),
    (b"\x15\x03\x01\x00\x02\x02\x46", "TLS"),
    (b"\x00", "it begins with"),
    (b"\xff" + bytes(9), "it begins with"),
    (greeting(b""), "names no mechanism"),
    (greeting(b"\xc3\xbc"), "names no mechanism"),
])
def test_what_is_no_greeting_says_what_it_looks_like(data: bytes, words: str) -> None:
    with pytest.raises(CorruptFrame, match=words):
        read_greeting(data)


@given(st.one_of(st.binary(max_size=100), st.binary(max_size=80).map(lambda rest: greeting()[:11] + rest)))
def test_whatever_a_stranger_sends_is_a_greeting_too_little_or_corrupt(data: bytes) -> None:
    try:
        read = read_greeting(data)
    except CorruptFrame:
        return
    assert read is None or (len(read.version) == 2 and isinstance(read.mechanism, str))


@pytest.mark.parametrize("curve", [False, True])
def test_libzmq_greets_whoever_opens(curve: bool) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        if curve:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, zmq.curve_keypair()[1])
        port = router.bind_to_random_port("tcp://127.0.0.1")
        data = b""
        with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
            connection.sendall(OPENING)
            while len(data) < GREETING_BYTES:
                data += connection.recv(GREETING_BYTES)
    read = read_greeting(data)
    assert read is not None and read.version[0] == 3
    assert read.mechanism == ("CURVE" if curve else "NULL")
