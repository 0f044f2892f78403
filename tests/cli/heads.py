"""Heads of a run for the tests of `doctor`, and everything else that may listen where a head is looked for."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from cosmos_actor.actors.head import Head
from cosmos_actor.bus import Bus, Identity, KeyRing, ZmqTransport, make_run_keys, new_incarnation
from cosmos_actor.job.roles import KEYED_ROLES

RUN = "run-1"


def make_keys(folder: Path, run_id: str = RUN) -> Path:
    """A folder with the key of every role."""
    make_run_keys(folder, run_id, KEYED_ROLES)
    return folder


def forge(key: Path, **changes: Any) -> Path:
    """A copy of a key file that says something else."""
    forged = key.with_name(f"forged-{key.name}")
    forged.write_text(json.dumps({**json.loads(key.read_text()), **changes}))
    forged.chmod(0o600)
    return forged


@asynccontextmanager
async def head(keys: Path, *, role: str = "supervisor", clock: Callable[[], float] = time.time,
               listen: str = "tcp://127.0.0.1:0", **options: Any) -> AsyncIterator[Head]:
    """A real one, over ZeroMQ, on the running loop; `address` is where it listens."""
    ring = KeyRing.load(keys / f"{role}.key")
    bus = Bus(Identity(ring.run_id, role, f"{role}-0", new_incarnation()), ZmqTransport(), ring, **options)
    made = Head(bus, {}, 0, clock=clock)
    await made.start(listen)
    try:
        yield made
    finally:
        await bus.close(0)


async def beside(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a thread while this loop turns."""
    return await asyncio.get_running_loop().run_in_executor(None, lambda: function(*arguments))


@contextmanager
def listener(speak: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """The address of a plain TCP listener whose connections `speak` until the event; not a bus."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def serve() -> None:
            while not over.is_set():
                try:
                    connection = server.accept()[0]
                except TimeoutError:
                    continue
                except OSError:
                    return
                threads.append(threading.Thread(target=_speak, args=(connection,)))
                threads[-1].start()

        def _speak(connection: socket.socket) -> None:
            with connection:
                try:
                    speak(connection, over)
                except OSError:
                    pass  # the other side has heard enough

        threads = [threading.Thread(target=serve)]
        threads[0].start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            for thread in threads:
                thread.join(5.0)


def raw_bytes(connection: socket.socket, over: threading.Event) -> None:
    """What a web server says to a greeting."""
    connection.recv(64)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def silence(connection: socket.socket, over: threading.Event) -> None:
    over.wait(30.0)


def one_byte_at_a_time(connection: socket.socket, over: threading.Event) -> None:
    """A greeting that would be whole after a quarter of a minute."""
    for byte in b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47):
        connection.sendall(bytes([byte]))
        if over.wait(0.25):
            return


@contextmanager
def null_socket() -> Iterator[str]:
    """A ZeroMQ socket without keys."""
    import zmq
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        yield f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"


@contextmanager
def full_backlog() -> Iterator[str]:
    """A port whose packets are dropped, as a firewall drops them: the kernel does so when nobody accepts."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = []
        for _ in range(3):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(server.getsockname())
        try:
            time.sleep(0.05)  # for the kernel to have queued them
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            for one in waiting:
                one.close()
