"""What the tests of the transports share."""

from __future__ import annotations

import base64
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.schema import decode
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.transports.raw_client import RawClient
from cosmos_actor.weight_plane.transports.raw_server import RawServer
from tests.waiting import stop

DEADLINE_S = 20.0
QUICK = BulkSettings(overdue_s=0.5, lost_s=0.3)


class Publisher:
    """The other process."""

    def __init__(self, popen, *words: str) -> None:
        command = [sys.executable, "-m", "tests.weight_plane.transports.publisher_process", *words]
        self.process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def publish(self, step: int) -> Manifest:
        """As a reader on another host sees it."""
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        manifest = decode(base64.b64decode(self.process.stdout.readline()), [])
        return replace(manifest, buckets=[replace(ref, host_id="another") for ref in manifest.buckets])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(5)

    def stop(self) -> None:
        """Alive, and silent."""
        stop(self.process.pid)


@contextmanager
def raw_server(store: BulkStore) -> Iterator[RawServer]:
    server = RawServer(store)
    server.start("127.0.0.1")
    try:
        yield server
    finally:
        server.close()


@contextmanager
def raw_client(settings: BulkSettings = QUICK, *, streams: int = 2, digested: bool = True) -> Iterator[RawClient]:
    client = RawClient(settings, streams=streams, digested=digested)
    try:
        yield client
    finally:
        client.close()
