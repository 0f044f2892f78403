"""Gone is what refuses; whatever else a network does is not taken for a death."""

from __future__ import annotations

import asyncio
import socket

import pytest

from cosmos_actor.bus.probe import refuses


def test_a_closed_port_refuses_and_an_open_one_does_not() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = "tcp://127.0.0.1:{}".format(listener.getsockname()[1])
        assert asyncio.run(refuses(address, 2.0)), "bound, but nobody listens"
        listener.listen()
        assert not asyncio.run(refuses(address, 2.0))


@pytest.mark.parametrize("address", ["", "memory://somewhere", "tcp://127.0.0.1", "tcp://no.such.host.invalid:1"])
def test_what_can_not_be_asked_is_not_gone(address: str) -> None:
    assert not asyncio.run(refuses(address, 2.0))


def test_silence_is_not_a_death() -> None:
    """A backlog that is full swallows connections without a word, as a cut cable does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        assert not asyncio.run(refuses(f"tcp://127.0.0.1:{port}", 0.2))
        for filler in fillers:
            filler.close()
