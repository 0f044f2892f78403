"""LIBERO through the bridge against a plain loop in LIBERO's own environment, in one run.

    python benchmarks/libero.py --sim-python .venv-libero/bin/python [--episodes 100] [--steps 40] [--json FILE]

    plain    a process of LIBERO's environment: reset, observe, then step and observe, nothing else
    bridge   here the driver; the same world in another such process, attached over CURVE, its next unit queued
    chunks   through the bridge, eight actions a request: what lies between is not rendered; against single steps of
             the same episodes, both without their resets

All play the same units (task, initial state, seed) with the same seeded actions. They take turns, `--block` episodes
each, so that other load on the machine meets all; while one plays, the others wait. What is compared: sha256 of every
observation, taken after the clock has stopped. Rates are steps a second, resets and their settling included; the first
turn, in which LIBERO opens its environments, is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # and not this folder: this file has the name of a library

from cosmos_actor.simulator_bridge.contract import Description, WorkUnit  # noqa: E402

ATTACH_S, STEP_S = 120.0, 300.0
CHUNK = 8
TARGETS = {"bridge": 0.97, "chunks": 3.0}
"""Of the plain loop's rate, and of the rate of single steps through the bridge."""
SIZES = (64, 96, 128)
Digests = list[list[str]]
"""Of each episode, each observation."""


def unit(description: Description, number: int, steps: int) -> WorkUnit:
    """Tasks in turn, then their initial states."""
    tasks = description.tasks
    task = tasks[number % len(tasks)]
    return WorkUnit(f"episode-{number}", task.name, 1000 + number, number // len(tasks) % task.initial_states, steps)


def actions(number: int, steps: int) -> np.ndarray:
    """[T, 7] float32, each drawn one held for four steps."""
    drawn = np.random.default_rng(number).uniform(-1, 1, (-(-steps // 4), 7)).astype(np.float32)
    return np.repeat(drawn, 4, axis=0)[:steps]


def digest(seen: dict[str, np.ndarray]) -> str:
    whole = hashlib.sha256()
    for name in sorted(seen):
        whole.update(np.ascontiguousarray(seen[name]).tobytes())
    return whole.hexdigest()


# ---- the plain loop, in LIBERO's environment


def play_plainly(world: Any, units: Sequence[WorkUnit], chosen: Sequence[np.ndarray]) -> dict[str, Any]:
    seen: list[list[dict[str, np.ndarray]]] = []
    steps, begun = 0, time.perf_counter()
    for one, script in zip(units, chosen, strict=True):
        world.reset(one)
        seen.append([world.observe()])
        for action in script:
            _, terminated, _ = world.step(action)
            seen[-1].append(world.observe())
            steps += 1
            if terminated:
                break
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "steps": steps, "digests": [[digest(each) for each in episode] for episode in seen]}


def parts(load: Any, kind: str) -> dict[str, float]:
    """Where the time goes, of the first task: milliseconds."""
    found = {}
    for size in SIZES:
        simulator = load(f"{kind}&size={size}")
        world, one = simulator.world(), unit(simulator.describe(), 0, 0)
        world.reset(one)
        world.observe()
        for camera in ("agentview", "robot0_eye_in_hand"):
            found[f"{camera} {size}"] = milliseconds(lambda: world._open.picture(camera, size), 20)  # noqa: B023
        if size == SIZES[0]:
            script = iter(actions(0, 200))
            found["step"] = milliseconds(lambda: world.step(next(script)), 100)  # noqa: B023
            found["reset"] = milliseconds(lambda: world.reset(one), 5)  # noqa: B023
        world.close()
    return found


def milliseconds(what: Any, times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        what()
    return (time.perf_counter() - begun) / times * 1e3


def serve_plainly(kind: str) -> None:
    """A request a line on stdin, its answer a line on stdout."""
    from cosmos_actor.simulator_bridge.plugins import SimulatorName
    from cosmos_actor.simulator_bridge.plugins import load as by_name

    def load(text: str) -> Any:
        return by_name(SimulatorName.parse(text))

    simulator = load(kind)
    description, world = simulator.describe(), simulator.world()
    for line in sys.stdin:
        asked = json.loads(line)
        if "parts" in asked:
            answer: Any = parts(load, kind.partition("&size")[0])
        else:
            numbers = range(asked["begin"], asked["end"])
            answer = play_plainly(world, [unit(description, number, asked["steps"]) for number in numbers],
                                  [actions(number, asked["steps"]) for number in numbers])
        print(json.dumps(answer), flush=True)


class Plain:
    """The other end of `serve_plainly`."""

    def __init__(self, python: str, kind: str) -> None:
        self._process = subprocess.Popen([python, __file__, "--plain", kind], stdin=subprocess.PIPE, text=True,
                                         stdout=subprocess.PIPE, env=environment())

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


# ---- the bridge


@asynccontextmanager
async def attached(python: str, kind: str) -> AsyncIterator[Any]:
    """The simulator, in a process of its own, for this driver."""
    from cosmos_actor.bus import Bus, Identity, KeyRing, ZmqTransport, make_run_keys, new_incarnation
    from cosmos_actor.bus.bulk.settings import BulkSettings
    from cosmos_actor.simulator_bridge.gateway import Gateway

    with tempfile.TemporaryDirectory() as folder:
        keys = make_run_keys(Path(folder), "benchmark", ["rollout", "simulator"])
        bus = Bus(Identity("benchmark", "rollout", "rollout-0", new_incarnation()), ZmqTransport(),
                  KeyRing.load(keys["rollout"]), bulk=BulkSettings())
        gateway = Gateway(bus, resume_s=5.0, silent_s=60.0)
        address = await bus.start("tcp://127.0.0.1:0")
        process = subprocess.Popen(
            [python, "-m", "cosmos_actor.cli", "attach", kind, "--connect", address, "--key", str(keys["simulator"])],
            stderr=subprocess.PIPE, env=environment())
        try:
            until = time.monotonic() + ATTACH_S
            while not gateway.present:
                if time.monotonic() > until or process.poll() is not None:
                    process.kill()
                    raise SystemExit(f"{kind} has not attached: {process.communicate()[1].decode()[-500:]}")
                await asyncio.sleep(0.01)
            yield gateway.present[0]
        finally:
            process.terminate()
            await bus.close(0.2)
            process.communicate()


async def play_bridged(simulator: Any, units: Sequence[WorkUnit], chosen: Sequence[np.ndarray],
                       chunk: int) -> dict[str, Any]:
    """As `play_plainly`; of chunks, only what was seen at the end of each."""
    from cosmos_actor.simulator_bridge.messages import Assignment

    seen: list[list[dict[str, np.ndarray]]] = []
    steps = moving_steps = 0
    moving_seconds, begun = 0.0, time.perf_counter()
    stepped = await simulator.reset([Assignment(0, units[0])], deadline_s=STEP_S)
    for number, script in enumerate(chosen):
        seen.append([of_slot(stepped.observations)])
        following = [Assignment(0, one) for one in units[number + 1:number + 2]]
        for at in range(0, len(script), chunk):
            asked = time.perf_counter()
            stepped = await simulator.step([0], script[None, at:at + chunk], deadline_s=STEP_S, queue=following)
            over = len(stepped.ended) > 0
            seen[-1].append(of_slot(stepped.final_observations if over else stepped.observations))
            steps += int(stepped.steps[0])
            if stepped.failures:
                raise SystemExit(str(stepped.failures))
            if over:
                break
            moving_seconds, moving_steps = moving_seconds + time.perf_counter() - asked, moving_steps + chunk
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "steps": steps, "moving": [moving_steps, moving_seconds],
            "digests": [[digest(each) for each in episode] for episode in seen]}


def of_slot(observations: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.copy(array[0]) for name, array in observations.items()}


# ---- both


async def compare(given: argparse.Namespace) -> dict[str, Any]:
    kind = f"libero:{given.suite}?tasks={given.tasks}&size={given.size}"
    plain = Plain(given.sim_python, kind)
    loop = asyncio.get_running_loop()
    turns: dict[str, list[Any]] = {"plain": [], "bridge": [], "chunks": []}
    try:
        async with attached(given.sim_python, kind) as simulator:
            description = simulator.description
            for begin in range(-given.block, given.episodes, given.block):
                numbers = range(max(begin, 0), min(max(begin, 0) + given.block, given.episodes))
                units = [unit(description, number, given.steps) for number in numbers]
                scripts = [actions(number, given.steps) for number in numbers]
                asked = {"begin": numbers.start, "end": numbers.stop, "steps": given.steps}
                turn = {"plain": await loop.run_in_executor(None, plain.ask, asked),
                        "bridge": await play_bridged(simulator, units, scripts, 1)}
                if len(turns["chunks"]) * given.block < given.chunked:
                    turn["chunks"] = await play_bridged(simulator, units, scripts, CHUNK)
                if begin >= 0:
                    for name, played in turn.items():
                        turns[name].append(played)
        found = results(turns)
        found["milliseconds"] = await loop.run_in_executor(None, plain.ask, {"parts": True})
    finally:
        plain.close()
    return {"kind": kind, "episodes": given.episodes, "steps": given.steps, **found}


def results(turns: dict[str, list[Any]]) -> dict[str, Any]:
    digests: dict[str, Digests] = {name: [one for played in all_ for one in played["digests"]]
                                   for name, all_ in turns.items()}
    pairs = [(one, other) for a, b in zip(digests["plain"], digests["bridge"], strict=True)
             for one, other in zip(a, b, strict=True)]
    skipped = [(one, other) for a, b in zip(digests["plain"], digests["chunks"], strict=False)
               for one, other in zip(a[::CHUNK], b, strict=True)]
    seconds = {name: sum(played["seconds"] for played in all_) for name, all_ in turns.items()}
    rates = {name: sum(played["steps"] for played in all_) / seconds[name] for name, all_ in turns.items() if all_}
    each = {name: [played["steps"] / played["seconds"] for played in all_] for name, all_ in turns.items()}
    moving = {name: np.sum([played["moving"] for played in turns[name][:len(turns["chunks"])]], axis=0)
              for name in ("bridge", "chunks")}
    moving_rates = {name: float(one[0] / one[1]) for name, one in moving.items()}
    return {
        "compared": len(pairs), "different": sum(one != other for one, other in pairs),
        "compared_chunks": len(skipped), "different_chunks": sum(one != other for one, other in skipped),
        "rates": rates, "bridge_of_plain": rates["bridge"] / rates["plain"],
        "bridge_of_plain_median": statistics.median(b / p for b, p in zip(each["bridge"], each["plain"], strict=True)),
        "without_resets": moving_rates, "chunks_of_single": moving_rates["chunks"] / moving_rates["bridge"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sim-python", default=sys.executable)
    parser.add_argument("--suite", default="libero_object")
    parser.add_argument("--tasks", default="0,3")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40, help=f"of an episode, more than {CHUNK}")
    parser.add_argument("--size", type=int, default=128, help="pixels")
    parser.add_argument("--block", type=int, default=4, help="episodes of a turn")
    parser.add_argument("--chunked", type=int, default=20, help="episodes that are also played in chunks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plain", metavar="KIND:ID", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plain:
        serve_plainly(given.plain)
        return 0
    found = asyncio.run(compare(given))
    print(f"{found['kind']}: {found['episodes']} episodes of {found['steps']} steps")
    print(f"observations compared {found['compared']}, different {found['different']}; "
          f"at the ends of chunks {found['compared_chunks']}, different {found['different_chunks']}")
    for name, rate in found["rates"].items():
        print(f"{name:8} {rate:8.2f} steps/s")
    print(f"bridge / plain {found['bridge_of_plain']:.3f} (median of the turns {found['bridge_of_plain_median']:.3f}, "
          f"wanted {TARGETS['bridge']})")
    moving = found["without_resets"]
    print(f"without resets: chunks of {CHUNK} {moving['chunks']:.2f} steps/s, single steps {moving['bridge']:.2f}: "
          f"{found['chunks_of_single']:.2f} times (wanted {TARGETS['chunks']})")
    print("ms: " + ", ".join(f"{name} {value:.1f}" for name, value in found["milliseconds"].items()))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return 1 if found["different"] or found["different_chunks"] else 0


if __name__ == "__main__":
    sys.exit(main())
