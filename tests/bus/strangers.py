"""Everything that may listen where a bus is looked for: real sockets that are none."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq


@contextmanager
def listener(speak: Callable[[socket.socket, threading.Event], None], port: int = 0) -> Iterator[str]:
    """The address of a plain TCP listener whose connections `speak` until the event; not a bus."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(0.05)

        def serve() -> None:
            while not over.is_set():
                try:
                    connection = server.accept()[0]
                except socket.timeout:
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
