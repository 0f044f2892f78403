"""The bus against raw pyzmq and a Ray actor, between two processes of one machine.

    python benchmarks/bus.py [--ray-python /path/to/python-with-ray] [--json FILE]

Round trip: one 49 kB observation out, an action of 7 floats back, one at a time (`Link.call`).
One way: small typed messages, each acknowledged after its handler (`send_work`); raw pyzmq acknowledges only the last.
Raw pyzmq is DEALER/ROUTER with blocking sockets and no serialisation at all, plain and with CURVE; the bus has CURVE.
The contenders take turns in short blocks, so that whatever else the machine does hits all of them. Ray runs by itself,
directly after. What is left out: several hosts, many peers, large arrays (see benchmarks/bulk.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from cosmos_actor.bus import Bus, Identity, KeyRing, ZmqTransport, make_run_keys, new_incarnation
from cosmos_actor.bus.schema import Array, array, schema

ROUNDS, CALLS = 20, 100
BLOCKS, BLOCK = 40, 2000
WITHIN_RAW, BETTER_P50, BETTER_P99 = 1.5, 5.0, 10.0
MESSAGES_PER_S, OF_RAW_DRAIN = 60_000, 0.5
"""Small messages on one link, each acknowledged, against raw pyzmq's own loop of sends and receives."""


@schema("bench.observation", version=1)
class Observation:
    step: int
    image: Array = array("uint8", "H", "W", 3)


@schema("bench.action", version=1)
class Action:
    joints: Array = array("float32", "J")


@schema("bench.note", version=1)
class Note:
    number: int
    text: str


IMAGE = np.random.default_rng(0).integers(0, 255, (128, 128, 3), dtype=np.uint8)
ACTION = Action(np.zeros(7, np.float32))


# -- servers, each a process of its own ----------------------------------------------------------------------------


async def serve_bus(keys: KeyRing) -> None:
    bus = Bus(Identity("bench", "policy", "policy-0", new_incarnation()), ZmqTransport(), keys)
    bus.serve(Observation, lambda message, link: ACTION)
    bus.serve(Note, lambda message, link: None)
    print(await bus.start(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def serve_raw(keys: KeyRing, curve: bool) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    if curve:
        router.curve_server = True
        router.curve_secretkey, router.curve_publickey = keys.secret.encode(), keys.public.encode()
    router.bind("tcp://127.0.0.1:0")
    print(router.last_endpoint.decode(), flush=True)
    action = bytes(60)
    while True:
        frames = router.recv_multipart()
        if len(frames) == 3:
            router.send_multipart([frames[0], action])
        elif frames[1] == b"last":
            router.send_multipart([frames[0], b"ok"])


# -- contenders ----------------------------------------------------------------------------------------------------


class Raw:
    def __init__(self, address: str, keys: KeyRing, curve: bool) -> None:
        self.dealer = zmq.Context.instance().socket(zmq.DEALER)
        self.dealer.sndhwm = 0
        if curve:
            self.dealer.curve_secretkey, self.dealer.curve_publickey = keys.secret.encode(), keys.public.encode()
            self.dealer.curve_serverkey = keys.key_of("policy").encode()
        self.dealer.connect(address)
        self.image = IMAGE.tobytes()

    async def round_trip(self) -> None:
        self.dealer.send_multipart([b"a header of forty bytes, as the bus has..", self.image])
        self.dealer.recv_multipart()

    async def one_way(self, count: int) -> None:
        for _ in range(count):
            self.dealer.send(b"a note of forty bytes, as the bus sends..")
        self.dealer.send(b"last")
        self.dealer.recv()


class Ours:
    def __init__(self, link: Any) -> None:
        self.link = link
        self.observation = Observation(1, IMAGE)
        self.note = Note(1, "hello")

    async def round_trip(self) -> None:
        await self.link.call(self.observation, deadline_s=10)

    async def one_way(self, count: int) -> None:
        for _ in range(count):
            receipt = await self.link.send_work(self.note)
        await receipt.result(10)


async def measure(addresses: dict[str, str], keys: KeyRing) -> dict[str, dict[str, list[float]]]:
    bus = Bus(Identity("bench", "controller", "controller-0", new_incarnation()), ZmqTransport(), keys)
    await bus.start(None)
    contenders: dict[str, Any] = {
        "raw plain": Raw(addresses["raw plain"], keys, False),
        "raw curve": Raw(addresses["raw curve"], keys, True),
        "bus": Ours(await bus.connect(addresses["bus"], role="policy")),
    }
    times: dict[str, dict[str, list[float]]] = {name: {"round_trip_s": [], "one_way_s": []} for name in contenders}
    for _ in range(ROUNDS):
        for name, contender in contenders.items():
            await _round_trips(contender, times[name]["round_trip_s"])
    for _ in range(BLOCKS):
        for name, contender in contenders.items():
            begin = time.perf_counter()
            await contender.one_way(BLOCK)
            times[name]["one_way_s"].append((time.perf_counter() - begin) / BLOCK)
    await bus.close(1)
    return times


async def _round_trips(contender: Any, times: list[float]) -> None:
    for index in range(CALLS + 10):
        begin = time.perf_counter()
        await contender.round_trip()
        if index >= 10:
            times.append(time.perf_counter() - begin)


def measure_ray(python: str) -> dict[str, Any]:
    command = [python, str(Path(__file__).with_name("ray_actor.py")), *map(str, (ROUNDS, CALLS, BLOCKS // 4, BLOCK))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


# -- the report ----------------------------------------------------------------------------------------------------


def summary(times: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, kinds in times.items():
        out[name] = {}
        for kind in ("round_trip_s", "one_way_s"):
            p50, p99 = np.percentile(kinds[kind], [50, 99])
            out[name][kind] = {"p50": float(p50), "p99": float(p99), "samples": len(kinds[kind])}
    return out


def verdicts(result: dict[str, Any]) -> dict[str, Any]:
    """What the bus promises, each with its figure: bound, and whether it holds in this run."""
    out = {}
    for kind in ("round_trip_s", "one_way_s"):
        ours, raw = result["bus"][kind], result["raw curve"][kind]
        ratio = ours["p50"] / raw["p50"]
        out[f"{kind[:-2]}: times raw with CURVE at p50"] = (ratio, f"<= {WITHIN_RAW}", ratio <= WITHIN_RAW)
        if "ray" in result:
            for quantile, bound in (("p50", BETTER_P50), ("p99", BETTER_P99)):
                factor = result["ray"][kind][quantile] / ours[quantile]
                out[f"{kind[:-2]}: better than Ray at {quantile}"] = (factor, f">= {bound:g}", factor >= bound)
    one_way = {name: 1 / kinds["one_way_s"]["p50"] for name, kinds in result.items()}
    rate = one_way["bus"]
    out["one_way: messages/s on one link"] = (rate, f">= {MESSAGES_PER_S}", rate >= MESSAGES_PER_S)
    share = rate / one_way["raw curve"]
    out["one_way: of raw pyzmq's drain loop"] = (share, f">= {OF_RAW_DRAIN:g}", share >= OF_RAW_DRAIN)
    return out


def show(result: dict[str, Any]) -> None:
    print(f"{'':12}{'round trip, 49 kB':>26}{'one way, small':>30}")
    print(f"{'':12}{'p50 us':>13}{'p99 us':>13}{'p50 us':>12}{'p99 us':>10}{'msg/s':>12}")
    for name, kinds in result.items():
        trip, one = kinds["round_trip_s"], kinds["one_way_s"]
        print(
            f"{name:12}{trip['p50'] * 1e6:13.0f}{trip['p99'] * 1e6:13.0f}"
            f"{one['p50'] * 1e6:12.1f}{one['p99'] * 1e6:10.1f}{1 / one['p50']:12.0f}"
        )


def run_loop(coroutine: Any) -> Any:
    """With uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


def spawn(kind: str, keys: str) -> Any:
    command = [sys.executable, __file__, "--serve", kind, "--keys", keys]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def benchmark(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        make_run_keys(folder, "bench", ["policy", "controller"])
        servers = {kind: spawn(kind, folder) for kind in ("raw plain", "raw curve", "bus")}
        try:
            addresses = {kind: server.stdout.readline().strip() for kind, server in servers.items()}
            times: dict[str, Any] = run_loop(measure(addresses, KeyRing.load(f"{folder}/controller.key")))
        finally:
            for server in servers.values():
                server.kill()
                server.communicate()
    if options.ray_python:
        times["ray"] = measure_ray(options.ray_python)
    result = summary(times)
    show(result)
    checks = verdicts(result)
    for name, (value, bound, holds) in checks.items():
        print(f"{'ok ' if holds else 'NOT'} {name}: {value:.2f} ({bound})")
    if not options.ray_python:
        print("Ray was not measured: give --ray-python PATH of an interpreter that has it.")
    if options.json:
        figures = {"result": result, "checks": checks, "cpus": os.cpu_count()}
        Path(options.json).write_text(json.dumps(figures, indent=1))
    return 0 if all(holds for _, _, holds in checks.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ray-python", default=os.environ.get("RAY_PYTHON"), help="interpreter that can import ray")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.serve:
        return benchmark(options)
    keys = KeyRing.load(f"{options.keys}/policy.key")
    servers: dict[str, Callable[[], Any]] = {
        "bus": lambda: run_loop(serve_bus(keys)),
        "raw plain": lambda: serve_raw(keys, False),
        "raw curve": lambda: serve_raw(keys, True),
    }
    servers[options.serve]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
