"""The bulk plane against memcpy, in one run: `python benchmarks/bulk.py [--json FILE]`.

    memcpy   one warm private array into another, numpy, one thread
    put      the same bytes into the store's shared memory, whose pages were used before
    fetch    in another process: from the reference to a read-only view, and what that process copied (nothing)
    stream   the same to a process that is told it is on another host, over TCP on the loopback, with and without CURVE

memcpy and put alternate, so that other load on the machine meets both. Medians; GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.bus import Identity, KeyRing, decode, encode, make_run_keys, new_incarnation
from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.bulk.server import BulkServer
from cosmos_actor.bus.bulk.settings import KIB, MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.bulk.streams import StreamClient

SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
LARGEST = max(SIZES)
TARGET = 0.6
"""Of memcpy, for 64 MiB."""
BUDGET = 4 * LARGEST


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def gigabytes(nbytes: int, took_s: float) -> float:
    return nbytes / took_s / 1e9


# -- in this process: memcpy and put ----------------------------------------------------------------------------------


def puts(store: BulkStore, nbytes: int) -> dict[str, float]:
    source, target = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def put() -> None:
        store.release(store.try_put(source, holder="benchmark"), "benchmark")

    copied, stored = [], []
    for _ in range(max(15, min(400, 256 * MIB // nbytes))):
        copied.append(seconds(lambda: np.copyto(target, source)))
        stored.append(seconds(put))
    copy_s, put_s = statistics.median(copied), statistics.median(stored)
    return {"memcpy_gb_s": gigabytes(nbytes, copy_s), "put_gb_s": gigabytes(nbytes, put_s),
            "put_of_memcpy": copy_s / put_s}


def cold_put() -> dict[str, float]:
    """The first put of a process, and the first after `bulk.prefault_bytes`."""
    source = np.ones(LARGEST, np.uint8)
    rates = {}
    for name, prefault in (("cold_put_gb_s", 0), ("prefaulted_put_gb_s", LARGEST)):
        store = BulkStore(identity(), BulkSettings(budget_bytes=BUDGET, prefault_bytes=prefault))
        rates[name] = gigabytes(LARGEST, seconds(lambda made=store: made.try_put(source, holder="benchmark")))
        store.close()
    return rates


def identity() -> Identity:
    return Identity("benchmark", "rollout", "rollout-0", new_incarnation())


# -- in another process: fetch ----------------------------------------------------------------------------------------


class Child:
    """The reading process: one line of JSON in, one out."""

    def __init__(self, key: str, encrypt: bool) -> None:
        command = [sys.executable, __file__, "--reader", key, str(int(encrypt))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def fetch(self, ref: BulkRef, times: int) -> dict[str, Any]:
        print(json.dumps({"ref": encode(ref)[0].hex(), "times": times}), file=self._process.stdin, flush=True)
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)


@contextmanager
def child(key: Path, encrypt: bool) -> Iterator[Child]:
    made = Child(str(key), encrypt)
    try:
        yield made
    finally:
        made.close()


def read_for_ever(key: str, encrypt: bool) -> None:
    settings = BulkSettings(encrypt=encrypt)
    reader = BulkReader(settings, StreamClient(settings, KeyRing.load(key)))
    for line in sys.stdin:
        task = json.loads(line)
        ref = decode(bytes.fromhex(task["ref"]), [])
        print(json.dumps(asyncio.run(fetch(reader, ref, task["times"]))), flush=True)
    reader.close()


async def fetch(reader: BulkReader, ref: BulkRef, times: int) -> dict[str, Any]:
    found = await reader.fetch(ref, deadline_s=60.0)
    total = int(found.sum(dtype=np.uint64))
    private = private_bytes()
    took = []
    for _ in range(times):
        del found
        begun = time.perf_counter()
        found = await reader.fetch(ref, deadline_s=60.0)
        took.append(time.perf_counter() - begun)
    assert int(found.sum(dtype=np.uint64)) == total
    counts = reader.statistics()
    return {"sum": total, "fetch_s": statistics.median(took), "private_growth_bytes": private_bytes() - private,
            "mapping": mapping_of(found.__array_interface__["data"][0]), "streamed_bytes": counts["streamed_bytes"]}


def private_bytes() -> int:
    """Memory of this process that is no shared mapping: a copied array would be in it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def mapping_of(address: int) -> str:
    """The line of /proc/self/maps that the address lies in: rights and name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return f"{line.split()[1]} {line.split(None, 5)[-1]}"
    return "none"


def fetches(store: BulkStore, reader: Child, nbytes: int) -> dict[str, Any]:
    array = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    ref = store.try_put(array, holder="benchmark")
    found = reader.fetch(ref, 200)
    store.release(ref, "benchmark")
    assert found["sum"] == int(array.sum(dtype=np.uint64))
    copies = found["streamed_bytes"] == 0 and found["mapping"].startswith("r--s /memfd:cosmos-actor-bulk")
    return {"fetch_us": found["fetch_s"] * 1e6, "reader_copied_bytes": 0 if copies else nbytes,
            "reader_private_growth_bytes": found["private_growth_bytes"], "mapping": found["mapping"]}


def stream(keys: dict[str, Path], encrypt: bool) -> float:
    store = BulkStore(identity(), BulkSettings(budget_bytes=BUDGET, encrypt=encrypt))
    server = BulkServer(store, KeyRing.load(keys["rollout"]))
    server.start("tcp://127.0.0.1:0")
    ref = replace(store.try_put(np.ones(LARGEST, np.uint8), holder="benchmark"), host_id="elsewhere")
    with child(keys["policy"], encrypt) as reader:
        found = reader.fetch(ref, 5)
    server.close()
    store.close()
    return gigabytes(LARGEST, found["fetch_s"])


# -- the report -------------------------------------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    store = BulkStore(identity(), BulkSettings(budget_bytes=BUDGET, prefault_bytes=BUDGET))
    with tempfile.TemporaryDirectory() as folder:
        keys = make_run_keys(Path(folder) / "keys", "benchmark", ["rollout", "policy"])
        with child(keys["policy"], True) as reader:
            sizes = [{"bytes": size, **puts(store, size), **fetches(store, reader, size)} for size in SIZES]
        store.close()
        streams = {"stream_curve_gb_s": stream(keys, True), "stream_plain_gb_s": stream(keys, False)}
    last = sizes[-1]
    return {
        "sizes": sizes, **cold_put(), **streams, "cores": os.cpu_count(), "numpy": np.__version__,
        "put_of_memcpy_64_mib": last["put_of_memcpy"], "target": TARGET,
        "met": last["put_of_memcpy"] >= TARGET and not any(row["reader_copied_bytes"] for row in sizes),
    }


def show(found: dict[str, Any]) -> None:
    print(f"{'size':>9} {'memcpy GB/s':>12} {'put GB/s':>9} {'put/memcpy':>11} {'fetch µs':>9} {'reader copied':>14}")
    for row in found["sizes"]:
        size = f"{row['bytes'] // KIB} KiB" if row["bytes"] < MIB else f"{row['bytes'] // MIB} MiB"
        print(f"{size:>9} {row['memcpy_gb_s']:12.2f} {row['put_gb_s']:9.2f} {row['put_of_memcpy']:11.2f} "
              f"{row['fetch_us']:9.1f} {row['reader_copied_bytes']:12d} B")
    print(f"\nthe reader's array lies in: {found['sizes'][-1]['mapping']}")
    print(f"first put of a process {found['cold_put_gb_s']:.2f} GB/s, after bulk.prefault_bytes "
          f"{found['prefaulted_put_gb_s']:.2f} GB/s")
    print(f"stream over the loopback: {found['stream_curve_gb_s']:.2f} GB/s with CURVE, "
          f"{found['stream_plain_gb_s']:.2f} GB/s without")
    print(f"64 MiB put at {found['put_of_memcpy_64_mib']:.2f} of memcpy (target {found['target']}): "
          f"{'met' if found['met'] else 'NOT met'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--reader", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader:
        read_for_ever(arguments.reader[0], bool(int(arguments.reader[1])))
        return 0
    found = measure()
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
