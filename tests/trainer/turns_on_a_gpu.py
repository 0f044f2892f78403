"""A trainer and an engine in processes of their own on one device, with and without turns: bits, peaks and seconds.

    python -m tests.trainer.turns_on_a_gpu [--model TINY] [--device cuda] [--steps 3]

Needs torch, transformers, numpy, pydantic, msgpack and pyzmq; no download. Prints one JSON object for each way, and
ends with 1 when a promise does not hold: equal losses, and a device that never had more than the larger side's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos_actor.actors.trajectory import TrajectoryGroup
from cosmos_actor.roles.engine import KV_CACHE, WEIGHTS
from cosmos_actor.roles.torch_engine import TorchEngine
from cosmos_actor.trainer.models import load_model
from cosmos_actor.trainer.parking import begin_measuring, memory_used
from cosmos_actor.trainer.policy import PolicyTrainer
from cosmos_actor.weight_plane.digest import weights_digest
from tests.trainer.make import make_settings, sample_groups

MODEL = ("tiny:qwen3?hidden=1024&layers=12&heads=8&kv_heads=8&intermediate=4096&vocab=32000&positions=1024")
"""0.23 billion parameters: 3.8 GB to train, and about as much for 256 sequences of 260 tokens and their cache."""
GROUPS, SAMPLES, NEW = 16, 16, 256
LOOK_S = 0.002
TOLERANCE = 1.05
WAYS: dict[str, int] = {"resident": 0, "level 1": 1, "level 2": 2}
"""Name -> sleep level; 0: nobody leaves the device."""
COLUMNS = ("prompt", "lengths", "tokens", "logprobs", "versions", "finished", "rewards")


def deterministic() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


# ---- the engine's process


def serve(model: str, device: str, new: int) -> None:
    """Do what each line on standard input says, and answer with one."""
    deterministic()
    where = torch.device(device)
    engine = TorchEngine(load_model(model, seed=99, dtype="bfloat16", device=where), stop_ids=(2,), pad_id=0)
    for line in sys.stdin:
        order = json.loads(line)
        begun = time.perf_counter()
        facts = obey(engine, order, new)
        if where.type == "cuda":
            torch.cuda.synchronize()
        print(json.dumps({**facts, "seconds": time.perf_counter() - begun}), flush=True)


def obey(engine: TorchEngine, order: dict[str, Any], new: int) -> dict[str, Any]:
    what = order["do"]
    if what == "sleep":
        peak, used = memory_used(engine.device)
        engine.sleep(order["level"])
        return {"peak": peak, "used": used}
    if what == "wake":
        if order["parts"] == [WEIGHTS]:
            begin_measuring(engine.device)
        engine.wake(order["parts"])
        return {}
    if what == "load":
        with np.load(order["path"]) as file:
            weights = dict(file)
        return {"digest": engine.load_weights(weights, order["version"], order["digest"])}
    if what == "peak":
        return {"peak": memory_used(engine.device)[0]}
    groups = sample_groups(engine, groups=GROUPS, samples=SAMPLES, seed=order["seed"], new=new)
    np.savez(order["path"], **{f"{number}/{name}": getattr(group, name)
                               for number, group in enumerate(groups) for name in COLUMNS})
    return {}


# ---- the trainer's process


class Engine:
    """The other process."""

    def __init__(self, model: str, device: str, new: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.turns_on_a_gpu", "--serve", "--model", model, "--device", device,
             "--new", str(new)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})

    def do(self, what: str, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **order}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60.0)
        self._process.stdout.close()


class Peak:
    """The most of the device that was in use while it looked, by everybody."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.bytes = device, 0

    def now(self) -> int:
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    @contextmanager
    def looking(self) -> Iterator[None]:
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                self.bytes = max(self.bytes, self.now())

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def measure(way: str, model: str = MODEL, device: str = "cuda", steps: int = 3, new: int = NEW) -> dict[str, Any]:
    """`steps` steps after one that warms up: losses, peaks in bytes, mean seconds of each part of a hand-over."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    deterministic()
    where, level = torch.device(device), WAYS[way]
    engine = Engine(model, device, new)
    found: dict[str, Any] = {"way": way, "losses": [], "digests": [], "policy_peak": 0, "engine_peak": 0, "base": 0}
    seconds: dict[str, list[float]] = {}
    if level:
        engine.do("sleep", level=level)
    trainer = PolicyTrainer(make_settings(model=model, device=device, publish_dtype="bfloat16", lr=1e-5,
                                          micro_batch_tokens=2048))
    peak = Peak(where)

    def timed(name: str, call: Any) -> Any:
        begun = time.perf_counter()
        answer = call()
        seconds.setdefault(name, []).append(time.perf_counter() - begun)
        return answer

    def step(number: int, folder: Path) -> None:
        snapshot = trainer.snapshot()
        assert snapshot is not None
        if level:
            timed("park", trainer.park)
            found["base"] = peak.now()  # both are away: contexts, and what libraries keep
            timed("wake weights", lambda: engine.do("wake", parts=[WEIGHTS]))
        weights = {name: array.copy() for name, array in snapshot.arrays().items()}
        digest = weights_digest(weights)
        snapshot.release()
        np.savez(folder / "weights.npz", **weights)
        timed("load", lambda: engine.do("load", path=str(folder / "weights.npz"), version=number, digest=digest))
        if level:
            timed("wake cache", lambda: engine.do("wake", parts=[KV_CACHE]))
        timed("generate", lambda: engine.do("generate", seed=number, path=str(folder / "groups.npz")))
        engine_peak = engine.do("peak")["peak"]
        if level:
            engine_peak = timed("sleep", lambda: engine.do("sleep", level=level))["peak"]
            timed("unpark", trainer.unpark)
        else:
            begin_measuring(where)
        metrics = timed("train", lambda: trainer.grpo_step(groups_of(folder / "groups.npz", number)))
        found["policy_peak"] = max(found["policy_peak"], trainer.memory()[0])
        found["engine_peak"] = max(found["engine_peak"], engine_peak)
        found["losses"].append([metrics["loss/total"], metrics["grad_norm"], metrics["mismatch/k3"]])
        found["digests"].append(digest)

    try:
        with tempfile.TemporaryDirectory() as folder:
            step(0, Path(folder))  # kernels are loaded, moments made
            seconds.clear()
            with peak.looking():
                for number in range(1, steps + 1):
                    step(number, Path(folder))
    finally:
        engine.close()
    found["device_peak"] = peak.bytes
    found["seconds"] = {name: round(sum(taken) / len(taken), 4) for name, taken in seconds.items()}
    return found


def groups_of(path: Path, version: int) -> list[TrajectoryGroup]:
    with np.load(path) as file:
        columns = dict(file)
    return [TrajectoryGroup(group_id=f"g{number:06d}", attempt=0, task=None, version_dispatch=version,
                            texts=[""] * SAMPLES, **{name: columns[f"{number}/{name}"] for name in COLUMNS})
            for number in range(GROUPS)]


def broken(found: dict[str, dict[str, Any]]) -> list[str]:
    """What of the promises does not hold."""
    wrong = []
    resident = found["resident"]
    for way, one in found.items():
        if (one["losses"], one["digests"]) != (resident["losses"], resident["digests"]):
            wrong.append(f"{way}: other numbers than resident")
        if not WAYS[way] or not one["device_peak"]:
            continue
        larger, both = max(one["policy_peak"], one["engine_peak"]), one["policy_peak"] + one["engine_peak"]
        took = one["device_peak"] - one["base"]
        if took > TOLERANCE * larger:
            wrong.append(f"{way}: the device had {took}, the larger side has {larger}")
        if took > 0.8 * both:
            wrong.append(f"{way}: the device had {took}, both sides together have {both}")
        if one["device_peak"] >= resident["device_peak"]:
            wrong.append(f"{way}: the device had no less than with both resident")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--new", type=int, default=NEW, help="tokens of an answer")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.device, options.new)
        return 0
    found = {}
    for way in WAYS:
        found[way] = measure(way, options.model, options.device, options.steps, options.new)
        print(json.dumps(found[way]), flush=True)  # the next may fail
    wrong = broken(found)
    print("\n".join(wrong) or "every promise holds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
