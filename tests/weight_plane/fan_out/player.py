"""One actor of a fan-out in a process of its own: `python -m tests.weight_plane.fan_out.player '{"actor": …}'`.

It plays a policy (publishes), a controller (announces; has the desk) or a rollout (pulls, holds, reports). Commands
come as lines of JSON on stdin, what happened goes out as lines of JSON. The actor's end can be ordered to a chunk:
{"arm": {"at": "sent" | "received", "chunk": 3, "signal": 9}}.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import threading
from typing import Any

import numpy as np

from cosmos_actor.actors.event_loop import run
from cosmos_actor.bus import Bus, BusError, Identity, KeyRing, Limits, ZmqTransport, identity
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.identity import new_incarnation
from cosmos_actor.bus.schema import Json, decode, encode, schema
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.fanout import HOLDER, BusDesk, FanOutSource
from cosmos_actor.weight_plane.fanout_desk import FanOutDesk
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.version import Version

TOPIC = "weights"


@schema("fan_out_report", version=1)
class Report:
    """What a rollout holds after a version was announced, and how it came to it."""

    actor: str
    epoch: int
    step: int
    digest: str
    """Of the tensors that it holds now."""
    seconds: float
    problem: str
    statistics: Json


def a_model(nbytes: int, step: int) -> dict[str, np.ndarray]:
    """Tensors of half a MiB, every byte of which is another in the next step."""
    base = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    half = MIB // 2
    return {f"layers.{at // half}": base[at:at + half] ^ np.uint8(step % 251 + 1) for at in range(0, nbytes, half)}


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class Player:
    """What the three have in common."""

    def __init__(self, actor: str, listen: str, key: str, desk: str = "", bulk: dict[str, Any] | None = None,
                 lost_after_s: float = 10.0) -> None:
        role = actor.rpartition("-")[0]
        self.bus = Bus(Identity("run", role, actor, new_incarnation()), ZmqTransport(), KeyRing.load(key),
                       limits=Limits(lost_after_s=lost_after_s), resolve_bulk=role != "controller",
                       bulk=BulkSettings(**(bulk or {})))
        self.desk_address, self._listen = desk, listen
        self._armed: dict[str, Any] = {}
        self._chunks = {"sent": 0, "received": 0}

    async def run(self) -> None:
        self._count_chunks()
        address = await self.bus.start(self._listen)
        if self.desk_address:
            await self.bus.connect(self.desk_address, role="controller", deadline_s=20.0)
        say(address=address, pid=os.getpid())
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        await asyncio.Event().wait()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in sys.stdin:
            (name, value), = json.loads(line).items()
            loop.call_soon_threadsafe(getattr(self, f"do_{name}"), value)
        os._exit(0)  # whoever gave the commands is gone

    def do_arm(self, fault: dict[str, Any]) -> None:
        self._chunks = {"sent": 0, "received": 0}
        self._armed = fault
        say(armed=True)

    def do_chunks(self, _: Any) -> None:
        say(chunks=self._chunks)

    def _count_chunks(self) -> None:
        server, streams = self.bus.bulk.server, self.bus.bulk_reader._streams
        answer, take = server.answer, streams._take

        def answered(frames: Any) -> Any:
            self._pass("sent")
            return answer(frames)

        def taken(frames: Any, now: float) -> None:
            self._pass("received")
            take(frames, now)

        server.answer, streams._take = answered, taken

    def _pass(self, at: str) -> None:
        if self._armed.get("at") == at and self._armed["chunk"] == self._chunks[at]:
            os.kill(os.getpid(), self._armed["signal"])
        self._chunks[at] += 1


class Policy(Player):
    def __init__(self, *, mib: int, bucket_bytes: int | None, **options: Any) -> None:
        super().__init__(**options)
        self._nbytes = mib * MIB
        self._publisher = WeightPublisher(self.bus.bulk_store, bucket_bytes=bucket_bytes)

    def do_publish(self, version: list[int]) -> None:
        epoch, step = version
        manifest = self._publisher.publish(Version("run", epoch, step), a_model(self._nbytes, step))
        say(manifest=base64.b64encode(encode(manifest)[0]).decode(), digest=manifest.digest,
            tensor_bytes=manifest.nbytes)


class Controller(Player):
    def __init__(self, *, patience_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._desk = FanOutDesk(self.bus, patience_s)
        self._announced = 0.0
        self.bus.serve_event(Report, self._on_report)
        self.bus.on_link_up(lambda link: say(up=link.actor))
        self.bus.on_link_down(lambda link, reason: say(down=link.actor))

    def do_announce(self, manifest: str) -> None:
        self._announced = asyncio.get_running_loop().time()
        self.bus.publish_state(TOPIC, decode(base64.b64decode(manifest), []))

    def do_statistics(self, _: Any) -> None:
        say(statistics=self._desk.statistics())

    def _on_report(self, report: Report, link: Any) -> None:
        say(report={name: getattr(report, name) for name in Report.__dataclass_fields__},
            after_s=asyncio.get_running_loop().time() - self._announced)


class Rollout(Player):
    def __init__(self, *, fan_out: bool, patience_s: float, deadline_s: float, corrupt: bool = False,
                 wrong_key: str = "", **options: Any) -> None:
        super().__init__(**options)
        if corrupt:
            self._flip_what_is_kept()
        if wrong_key:
            self.bus.bulk.server._keys = KeyRing.load(wrong_key)
        bus = self.bus
        source = FanOutSource(bus.bulk_reader, bus.bulk_store, BusDesk(bus), patience_s=patience_s,
                              budget_bytes=bus.bulk_store.settings.budget_bytes) if fan_out else None
        self._subscriber = WeightSubscriber(bus.bulk_reader, "run", source)
        self._deadline_s, self._held = deadline_s, {}
        bus.serve_state(TOPIC, self._on_weights)

    async def _on_weights(self, manifest: Any, link: Any) -> None:
        loop = asyncio.get_running_loop()
        begun, problem = loop.time(), ""
        try:
            self._held = await self._subscriber.pull(manifest, self._deadline_s)
        except BusError as error:
            problem = f"{type(error).__name__}: {error}"
        seconds = loop.time() - begun
        digest = await loop.run_in_executor(None, weights_digest, self._held) if self._held else ""
        await link.emit(Report(self.bus.identity.actor, manifest.version.epoch, manifest.version.step, digest, seconds,
                               problem, self._subscriber.statistics()))

    def _flip_what_is_kept(self) -> None:
        store = self.bus.bulk_store
        put = store.try_put

        def flipped(array: np.ndarray, *, holder: str, dtype: str = "") -> Any:
            if holder == HOLDER:
                array = array.copy()
                array.reshape(-1).view(np.uint8)[array.nbytes // 2] ^= 1
            return put(array, holder=holder, dtype=dtype)

        store.try_put = flipped


def main() -> None:
    options = json.loads(sys.argv[1])
    host = options.pop("host", "")
    if host:  # another boot, as far as anybody can tell: nothing is read in place
        identity._first_line = lambda path: host
    kind = {"policy": Policy, "controller": Controller, "rollout": Rollout}[options["actor"].rpartition("-")[0]]

    async def play() -> None:
        await kind(**options).run()

    run(play())


if __name__ == "__main__":
    main()
