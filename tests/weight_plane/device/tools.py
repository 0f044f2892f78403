"""What the tests of the device path share: a publisher in another process, and who pulls from it."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys

from cosmos_actor.bus.schema import decode
from cosmos_actor.weight_plane.device_pull import DevicePull
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from tests.weight_plane.memory_bulk import MemoryBulk
from tests.weight_plane.transports.tools import DEADLINE_S


class DevicePublisherProcess:
    """The other process."""

    def __init__(self, popen, device: str = "cpu", *words: object) -> None:
        command = [sys.executable, "-m", "tests.weight_plane.device.publisher_process", device, *map(str, words)]
        self.process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def publish(self, step: int) -> Manifest:
        return decode(base64.b64decode(self.say(str(step))), [])

    def say(self, line: str) -> str:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


class Puller:
    """A subscriber whose versions come by one transport."""

    def __init__(self, transport) -> None:
        self.transport = transport
        self.subscriber = WeightSubscriber(MemoryBulk(), "run", device=DevicePull(lambda ref: transport))

    def pull(self, manifest: Manifest, deadline_s: float = DEADLINE_S):
        return asyncio.run(self.subscriber.pull(manifest, deadline_s))
