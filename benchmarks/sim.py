"""Simulators through the bridge against gymnasium's own vector environments, in one run.

    python benchmarks/sim.py --sim-python sim/bin/python [--seconds 5] [--json FILE]

    bridge   here the driver; the simulator in a process of its own, from its own environment, over CURVE
    async    gymnasium.vector.AsyncVectorEnv, one process a world, in the simulator's environment
    sync     gymnasium.vector.SyncVectorEnv, all worlds in one process, no other process at all

Each steps the same worlds with random actions and gets every observation. The three take turns, `--rounds` times, so
that other load on the machine meets all; medians. `sim/bin/python` needs gymnasium, minigrid, pyzmq, msgpack and numpy.
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
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.actors.event_loop import run as run_loop
from cosmos_actor.bus import Bus, Identity, KeyRing, ZmqTransport, make_run_keys, new_incarnation
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.simulator_bridge.contract import WorkUnit
from cosmos_actor.simulator_bridge.gateway import AttachedSimulator, Gateway
from cosmos_actor.simulator_bridge.messages import Assignment

ROOT = Path(__file__).resolve().parents[1]
ATTACH_S = 60.0
WARM_UP_STEPS = 20

PIXELS = ("minigrid:MiniGrid-Empty-8x8-v0?wrappers=minigrid.wrappers:RGBImgObsWrapper(tile_size=8),"
          "minigrid.wrappers:ImgObsWrapper")
"""RGB of 64 x 64: eight fields of eight pixels. A world takes a millisecond, so more than one process is worth it."""
CASES = {
    "CartPole x16": {"kind": "gymnasium:CartPole-v1", "envs": 16, "actions": 2, "processes": 1,
                     "targets": {"async": 4.0, "sync": 0.6}},
    "MiniGrid RGB 64x64 x8": {"kind": "gymnasium:" + PIXELS, "envs": 8, "actions": 7, "processes": 2,
                              "targets": {"best": 1.0}},
}

VECTOR = '''
import sys, time
import gymnasium as gym
import numpy as np

def make():
    if "MiniGrid" not in sys.argv[1]:
        return gym.make(sys.argv[1])
    import minigrid
    from minigrid.wrappers import ImgObsWrapper, RGBImgObsWrapper
    return ImgObsWrapper(RGBImgObsWrapper(gym.make(sys.argv[1].partition(":")[2]), tile_size=8))

if __name__ == "__main__":
    envs, seconds, kind = int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    vector = {"async": gym.vector.AsyncVectorEnv, "sync": gym.vector.SyncVectorEnv}[kind]([make] * envs)
    vector.reset(seed=0)
    draw, count = np.random.default_rng(0), vector.single_action_space.n
    for _ in range(20):
        vector.step(draw.integers(0, count, envs))
    chosen = draw.integers(0, count, (1000, envs))
    steps, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        vector.step(chosen[steps // envs % 1000])
        steps += envs
    print(steps / (time.perf_counter() - begun))
    vector.close()
'''


def vector_rate(python: str, kind: str, case: dict[str, Any], seconds: float) -> float:
    """World steps a second of one of gymnasium's vector environments."""
    name = case["kind"].partition(":")[2].partition("?")[0]
    done = subprocess.run([python, "-c", VECTOR, name, str(case["envs"]), str(seconds), kind], check=True, text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return float(done.stdout)


async def bridge_rate(python: str, case: dict[str, Any], seconds: float, processes: int) -> float:
    """World steps a second through the bridge, the worlds spread over `processes`."""
    with tempfile.TemporaryDirectory() as folder:
        keys = make_run_keys(Path(folder), "benchmark", ["rollout", "simulator"])
        identity = Identity("benchmark", "rollout", "rollout-0", new_incarnation())
        bus = Bus(identity, ZmqTransport(), KeyRing.load(keys["rollout"]), bulk=BulkSettings())
        gateway = Gateway(bus, resume_s=5.0, silent_s=5.0)
        address = await bus.start("tcp://127.0.0.1:0")
        share = case["envs"] // processes
        started = [subprocess.Popen(
            [python, "-m", "cosmos_actor.cli", "attach", case["kind"], "--connect", address, "--key",
             str(keys["simulator"]), "--envs", str(share), "--name", f"simulator-{at}"], stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}) for at in range(processes)]
        try:
            until = time.monotonic() + ATTACH_S
            while len(gateway.present) < processes:
                if time.monotonic() > until or any(process.poll() is not None for process in started):
                    raise SystemExit(f"{case['kind']} has not attached; try: {' '.join(map(str, started[0].args))}")
                await asyncio.sleep(0.01)
            rates = await asyncio.gather(*(drive(one, case["actions"], seconds) for one in gateway.present))
            return sum(rates)
        finally:
            for process in started:
                process.terminate()
            await bus.close(0.2)
            for process in started:
                process.wait()


async def drive(simulator: AttachedSimulator, actions: int, seconds: float) -> float:
    """Step all its slots with random actions; an episode that ends is followed by the queued one."""
    slots, draw, unit = simulator.slots, np.random.default_rng(0), iter(range(1 << 30))

    def assign(which: Any) -> list[Assignment]:
        return [Assignment(slot, WorkUnit(f"u{number}", task, seed=number))
                for slot, number in zip(which, unit, strict=False)]

    task = simulator.description.tasks[0].name
    await simulator.reset(assign(slots), deadline_s=60.0, queue=assign(slots))
    chosen = draw.integers(0, actions, (1000, len(slots), 1))
    steps, queue, begun = -WARM_UP_STEPS * len(slots), [], time.perf_counter()
    while True:
        stepped = await simulator.step(slots, chosen[steps // len(slots) % 1000], deadline_s=30.0, queue=queue)
        queue = assign(stepped.ended.tolist())
        steps += len(slots)
        if steps == 0:
            begun = time.perf_counter()
        if steps > 0 and time.perf_counter() - begun > seconds:
            return steps / (time.perf_counter() - begun)


def compare(python: str, case: dict[str, Any], seconds: float, rounds: int, processes: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"bridge": [], "async": [], "sync": []}
    for _ in range(rounds):
        found["bridge"].append(run_loop(bridge_rate(python, case, seconds, processes or case["processes"])))
        for kind in ("async", "sync"):
            found[kind].append(vector_rate(python, kind, case, seconds))
    rates = {name: statistics.median(values) for name, values in found.items()}
    rates["best"] = max(rates["async"], rates["sync"])
    met = {name: rates["bridge"] / rates[name] >= factor for name, factor in case["targets"].items()}
    return {**rates, "of_async": rates["bridge"] / rates["async"], "of_sync": rates["bridge"] / rates["sync"],
            "targets": case["targets"], "met": met}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sim-python", default=sys.executable)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=0,
                        help="simulator processes that share the worlds; without it as many as the case says")
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = {name: compare(given.sim_python, CASES[name], given.seconds, given.rounds, given.processes)
               for name in given.case or CASES}
    print(f"{'world steps a second':26} {'bridge':>9} {'async':>9} {'sync':>9} {'of async':>9} {'of sync':>9}  targets")
    for name, row in results.items():
        wanted = ", ".join(f"{'met' if row['met'][key] else 'MISSED'} {factor:g}x {key}"
                           for key, factor in row["targets"].items())
        print(f"{name:26} {row['bridge']:9.0f} {row['async']:9.0f} {row['sync']:9.0f} {row['of_async']:9.2f} "
              f"{row['of_sync']:9.2f}  {wanted}")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
