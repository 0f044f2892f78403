"""What a version of the weights costs on each transport, beside the ceiling of its wire, measured in the same run.

    python benchmarks/weights.py [--model tiny|0.6b|8b] [--json FILE] [--only shm,tcp,...] [--limit-s 600] [--digests]

    shm        put and fetch + copy out, against memcpy               (one copy each; one host)
    tcp        fetch by raw streams, plain and with keyed digests, against as many bare TCP connections
    zmq        fetch by the bulk plane's streams, plain and with CURVE, against bare ZeroMQ
    gloo       from one flat into another by a group of two, against torch.distributed.broadcast
    mapped     from one flat into another out of mapped memory, against a copy: what cuda_ipc does, with a CPU's memory
    directory  write and read with digests, against bare files of the same bytes
    whole      publish and pull as a job does them, digests and all, against the digest alone
    gpu        where there are any, in three parts: `copies` and digests within one, against a device copy; `cuda_ipc`
               likewise; `nccl` to the second GPU against its bare broadcast

Each is a process of its own and has --limit-s: what fails or hangs costs its own figures, which are named at the end,
and an exit code of 1. FILE has all rows that there are at any time.

Random weights in the shapes of Qwen3. Best of the rounds, in which a ceiling and what is held against it take turns;
GB are 10^9 bytes. What is between two processes runs over the loopback or the shared memory of this host, so on few
cores both ends share what on two hosts each has for itself.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from weights_devices import copies, gloo, mapped, nccl, on_gpus
from weights_peer import PIECE_BYTES, QWEN3, a_model
from weights_table import DEADLINE_S, Table, peer, within

from cosmos_actor.bus import Identity, KeyRing, decode, make_run_keys, new_incarnation
from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.bulk.streams import StreamClient
from cosmos_actor.weight_plane.digest import raw, weights_digest
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.publisher import BUCKET_BYTES, WeightPublisher
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.transports.directory import VersionDirectory
from cosmos_actor.weight_plane.transports.raw_client import RawClient
from cosmos_actor.weight_plane.version import Version

CANDIDATES = ("sha256", "blake2b", "blake2s", "sha1", "sha3_256")
STREAMS = (1, 2, 4)


def elsewhere(said: dict[str, Any], address: str = "") -> Manifest:
    """The published manifest as another host sees it."""
    manifest = decode(base64.b64decode(said["manifest"]), [])
    return replace(manifest, buckets=[replace(ref, host_id="another", address=address or ref.address)
                                      for ref in manifest.buckets])


def fetch_all(reader: Any, manifest: Manifest, at_once: int = 4) -> None:
    """Every bucket, `at_once` at a time as a subscriber does it."""

    async def run() -> None:
        turns = asyncio.Semaphore(at_once)

        async def one(ref: Any) -> None:
            async with turns:
                await reader.fetch(ref, deadline_s=DEADLINE_S)

        await asyncio.gather(*(one(ref) for ref in manifest.buckets))

    asyncio.run(run())


# -- one host's memory ----------------------------------------------------------------------------------------------


def shm(table: Table, model: str) -> None:
    weights = a_model(model)
    nbytes = sum(array.nbytes for array in weights.values())
    flat = np.resize(raw(next(iter(weights.values()))), nbytes)
    target = np.ones_like(flat)
    store = BulkStore(Identity("benchmark", "policy", "policy-0", new_incarnation()),
                      BulkSettings(budget_bytes=nbytes + 64 * MIB))
    reader = BulkReader()
    parts = [flat[at:at + BUCKET_BYTES] for at in range(0, nbytes, BUCKET_BYTES)]
    kept: list[Any] = []

    def put() -> None:
        while kept:
            store.release(kept.pop(), "holder")
        kept.extend(store.try_put(part, holder="holder") for part in parts)

    def fetch() -> None:
        async def run() -> None:
            for number, ref in enumerate(kept):
                found = await reader.fetch(ref, deadline_s=DEADLINE_S)
                np.copyto(target[number * BUCKET_BYTES:][: len(found)], found)

        asyncio.run(run())

    table.against("shm", nbytes, ("memcpy, one thread", lambda: np.copyto(target, flat)), ("put", put),
                  ("fetch and copy out", fetch))
    reader.close()
    store.close()


def whole(table: Table, model: str) -> None:
    weights = a_model(model)
    nbytes = sum(array.nbytes for array in weights.values())
    store = BulkStore(Identity("benchmark", "policy", "policy-0", new_incarnation()),
                      BulkSettings(budget_bytes=3 * nbytes + 64 * MIB))
    publisher, reader = WeightPublisher(store), BulkReader()
    subscriber = WeightSubscriber(reader, "benchmark")
    steps = iter(range(1000))
    published: list[Manifest] = []
    table.against(
        "whole", nbytes, ("digest alone", lambda: weights_digest(weights)),
        ("publish", lambda: published.append(publisher.publish(Version("benchmark", 0, next(steps)), weights))),
        ("pull, by shm", lambda: asyncio.run(subscriber.pull(published[-1], DEADLINE_S))))
    reader.close()
    store.close()


# -- streams --------------------------------------------------------------------------------------------------------


def bare_tcp(port: int, nbytes: int, streams: int) -> Callable[[], None]:
    """Receives as many bytes over as many connections, a thread each."""
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    target = np.zeros(nbytes, np.uint8)
    parts = [part.data for part in np.array_split(target, streams)]

    def receive(connection: socket.socket, part: memoryview) -> None:
        connection.sendall(len(part).to_bytes(8, "little"))
        at = 0
        while at < len(part):
            at += connection.recv_into(part[at:at + PIECE_BYTES], 0, socket.MSG_WAITALL)

    def run() -> None:
        threads = [threading.Thread(target=receive, args=pair) for pair in zip(connections, parts, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


def tcp(table: Table, model: str) -> None:
    with peer("publish", "--model", model) as said, peer("tcp") as bare:
        manifest = elsewhere(said)
        nbytes = sum(ref.nbytes for ref in manifest.buckets)
        for streams in STREAMS:
            clients = [RawClient(BulkSettings(), streams=streams, digested=digested) for digested in (False, True)]
            plain, digested = (lambda client=client: fetch_all(client, manifest) for client in clients)
            table.against("tcp", nbytes, (f"{streams} bare", bare_tcp(bare["port"], nbytes, streams)),
                          (f"{streams} raw streams, plain", plain), (f"{streams} raw streams, keyed digests", digested))
            for client in clients:
                client.close()


def bare_zmq(said: dict[str, Any], curve: bool, count: int) -> Callable[[], None]:
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    if curve:
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.curve_serverkey = said["key"].encode()
    dealer.rcvhwm = 64
    dealer.connect(f"tcp://127.0.0.1:{said['port']}")

    def run() -> None:
        dealer.send(str(count).encode())
        for _ in range(count):
            dealer.recv(copy=False)

    return run


def zeromq(table: Table, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keys = make_run_keys(Path(folder) / "keys", "benchmark", ["policy", "rollout"])
        for curve in (False, True):
            how = "CURVE" if curve else "plain"
            flags = ["--key", keys["policy"]] if curve else []
            with peer("publish", "--model", model, *flags) as said, peer("curve" if curve else "zmq") as bare:
                manifest = elsewhere(said, said["tcp"])
                count = sum(-(-ref.nbytes // PIECE_BYTES) for ref in manifest.buckets)
                nbytes = sum(ref.nbytes for ref in manifest.buckets)
                settings = BulkSettings(encrypt=curve)
                reader = BulkReader(settings, StreamClient(settings, KeyRing.load(keys["rollout"]) if curve else None))
                table.against("zmq", nbytes, (f"bare, {how}, 4 MiB messages", bare_zmq(bare, curve, count)),
                              (f"bulk streams, {how}, keyed digests",
                               lambda reader=reader, manifest=manifest: fetch_all(reader, manifest)))
                reader.close()


# -- files ----------------------------------------------------------------------------------------------------------


def directory(table: Table, model: str) -> None:
    weights = a_model(model)
    nbytes = sum(array.nbytes for array in weights.values())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bare"

        def write() -> None:
            path.unlink(missing_ok=True)
            with path.open("wb") as file:
                for array in weights.values():
                    file.write(raw(array).data)

        def read() -> None:
            with path.open("rb") as file:
                for array in weights.values():
                    file.readinto(np.empty(array.nbytes, np.uint8).data)  # type: ignore[attr-defined]

        versions, steps = VersionDirectory(folder, "benchmark", keep=1), iter(range(1000))
        table.against("directory", nbytes, ("bare write (page cache)", write), (
            "write, with digests", lambda: versions.write(Version("benchmark", 0, next(steps)), weights)))
        table.against("directory", nbytes, ("bare read (page cache)", read), ("read, with digests", versions.read))


def digests() -> None:
    data = np.random.default_rng(0).integers(0, 256, 64 * MIB, np.uint8)
    for name in CANDIDATES:
        begun = time.perf_counter()
        hashlib.new(name, data).digest()
        print(f"{name:10} {data.nbytes / (time.perf_counter() - begun) / 1e9:6.2f} GB/s on one core")


PARTS = ("shm", "tcp", "zmq", "gloo", "mapped", "directory", "whole", "copies", "cuda_ipc", "nccl")


def part(name: str, model: str, rounds: int, path: Path | None) -> None:
    """One of them, here."""
    table = Table(rounds, path)
    ways: dict[str, Callable[[], None]] = {
        "shm": lambda: shm(table, model), "tcp": lambda: tcp(table, model), "zmq": lambda: zeromq(table, model),
        "gloo": lambda: gloo(table, model, rounds), "mapped": lambda: mapped(table, model),
        "directory": lambda: directory(table, model), "whole": lambda: whole(table, model),
        "copies": lambda: copies(table, model), "cuda_ipc": lambda: mapped(table, model, "cuda:0"),
        "nccl": lambda: nccl(table, model, rounds)}
    ways[name]()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", choices=list(QWEN3), default="tiny")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only", default="shm,tcp,zmq,gloo,mapped,directory,whole,gpu")
    options.add_argument("--limit-s", type=float, default=600.0, help="of each of them")
    options.add_argument("--json", type=Path, help="write the rows there too")
    options.add_argument("--digests", action="store_true", help="only the rates of candidate digests")
    options.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.digests:
        digests()
        return 0
    if chosen.part:
        part(chosen.part, chosen.model, chosen.rounds, chosen.json)
        return 0
    print(f"Qwen3 {chosen.model} in bfloat16, {os.cpu_count()} cores, best of {chosen.rounds}", flush=True)
    facts = {"model": chosen.model, "cores": os.cpu_count(), "rounds": chosen.rounds}
    rows: list[Any] = []
    failed: dict[str, str] = {}
    for name in ",".join(on_gpus() if word == "gpu" else word for word in chosen.only.split(",")).split(","):
        if not name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "rows.json"
            problem = within(chosen.limit_s, [sys.executable, __file__, "--part", name, "--model", chosen.model,
                                              "--rounds", chosen.rounds, "--json", found])
            rows += json.loads(found.read_text()) if found.exists() else []
        if problem:
            failed[name] = problem
            print(f"{name:10} FAILED: {problem}", flush=True)
        if chosen.json is not None:
            chosen.json.write_text(json.dumps({**facts, "failed": failed, "rows": rows}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
