"""What it gains to train while the next experience is sampled: a recipe asynchronous and synchronous, seed by seed.

    python benchmarks/async_gain.py [RECIPE] [--seeds 0 1 2] [--steps N] [--staleness 2] [--set NAME=VALUE]…

    synchronous   run.max_staleness = 0: the rollout waits for each version, the policy for each step's groups
    asynchronous  run.max_staleness = --staleness: both go on

Both run the same settings otherwise, one after the other, and nothing else should run beside them. Tokens trained a
second and idle shares are of the steps after the first --skip ones, evaluations left out. A GPU's idle share is 1 - its
utilisation as nvidia-smi samples it, where there is one; an actor's is the share of a step in which it computed
nothing. Writes async_gain.json and async_gain.svg (rewards by time, a curve a run) into --out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.cli.charts import Series, line_chart

MODES = ("synchronous", "asynchronous")
WANTED = 1.7
SAMPLE_MS = 200
STOP_S = 30.0
REWARD = "reward/mean"
SCORE = "eval/accuracy"
COLOURS = ("#0b6bcb", "#c4267a")
"""By mode."""
STYLE = ".grid{stroke:#ddd}.tick,.label{fill:#555;font-size:11px}.curve{fill:none;stroke-width:2}.hover{opacity:0}"


class Utilisation:
    """Samples of every GPU of this host while it is open; none where nvidia-smi is not."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int, float]] = []
        """(seconds after 1970, GPU, share of its time in use)"""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Utilisation:
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(
                ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits", "-lms",
                 str(SAMPLE_MS)], stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def idle(self, begin: float, end: float) -> dict[int, float]:
        """GPU -> share of [begin, end] in which it computed nothing."""
        found: dict[int, list[float]] = {}
        for at, gpu, share in list(self.samples):
            if begin <= at <= end:
                found.setdefault(gpu, []).append(1.0 - share)
        return {gpu: statistics.fmean(shares) for gpu, shares in sorted(found.items())}

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            gpu, share = line.split(",")
            self.samples.append((time.time(), int(gpu), float(share) / 100))


class Failed(Exception):
    """One run; the others have their figures."""


def finished(process: subprocess.Popen[bytes], deadline_s: float) -> int:
    """Its exit code; one that takes longer is asked to end, so that its actors end too."""
    for send, seconds in ((None, deadline_s), (process.terminate, STOP_S), (process.kill, STOP_S)):
        if send is not None:
            send()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
    return -1


def run(mode: str, seed: int, wanted: argparse.Namespace) -> dict[str, Any]:
    """One run of the recipe, and what its metrics say of it."""
    folder = wanted.out / f"{mode}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    staleness = wanted.staleness if mode == "asynchronous" else 0
    own = [f"run.max_staleness={staleness}", f"run.seed={seed}", f"run.steps={wanted.steps}"]
    command = [sys.executable, "-m", "cosmos_actor.cli", "up", wanted.recipe, "--run-dir", str(folder)]
    command += [word for setting in [*wanted.set, *own] for word in ("--set", setting)]
    begun = time.time()
    with Utilisation() as gpus, (wanted.out / f"{mode}-{seed}.log").open("w") as log:
        code = finished(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), wanted.deadline_s)
        ended = time.time()
    if code:
        raise Failed(f"async_gain: {mode}, seed {seed}: exit code {code}, see {log.name}")
    lines = read_json_lines(folder / "metrics.jsonl")
    made = {"mode": mode, "seed": seed, "seconds": ended - begun, **summary(lines, wanted.skip)}
    last = lines[-1]["time"]
    steps = [line for line in lines if line.get("phase") not in ("sft", "eval")]
    first = steps[min(wanted.skip, len(steps) - 1)]["time"]
    return {**made, "idle_gpu": gpus.idle(ended - (last - first), ended)}


def summary(lines: Sequence[dict[str, Any]], skip: int) -> dict[str, Any]:
    """The figures of one run from its metrics."""
    steps = [line for line in lines if line.get("phase") not in ("sft", "eval")]
    counted = steps[skip:]
    if not counted:
        raise Failed(f"async_gain: no steps are left after the first {skip}: raise --steps")
    seconds = sum(line["time/step"] for line in counted)
    scores = [(line["step"], line[SCORE]) for line in lines if line.get("phase") == "eval" and SCORE in line]
    return {
        "tokens_s": sum(line["tokens"] for line in counted) / seconds,
        "step_s": statistics.median(line["time/step"] for line in counted),
        "idle_policy": sum(line["wait/policy"] for line in counted) / seconds,
        "idle_rollout": sum(line["wait/rollout"] for line in counted) / seconds,
        "reward_last": statistics.fmean(line[REWARD] for line in steps[-10:]),
        "scores": scores, "score": scores[-1][1] if scores else None,
        "rewards": [(line["time"], line[REWARD]) for line in steps],
    }


COLUMNS = ("mode", "seed", "tokens trained/s", "step s", "policy idle", "rollout idle", "GPUs idle", "reward, last ten",
           "held out")


def table(runs: Sequence[dict[str, Any]]) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for one in runs:
        gpus = ", ".join(f"{share:.2f}" for share in one["idle_gpu"].values()) or "-"
        rows.append((one["mode"], str(one["seed"]), f"{one['tokens_s']:.0f}", f"{one['step_s']:.2f}",
                     f"{one['idle_policy']:.2f}", f"{one['idle_rollout']:.2f}", gpus, f"{one['reward_last']:.3f}",
                     "-" if one["score"] is None else f"{one['score']:.3f}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def drawing(runs: Sequence[dict[str, Any]]) -> str:
    """The rewards of all runs by time, as a file of its own."""
    curves = [Series(f"{one['mode']} {one['seed']}", one["rewards"]) for one in runs]
    chart = line_chart("Reward by time", curves, x_label="seconds of training", y_label="mean reward of a step",
                       y_range=(0.0, 1.0))
    colours = ";".join(f"--series-{at + 1}:{COLOURS[MODES.index(one['mode'])]}" for at, one in enumerate(runs))
    head, rest = chart.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>svg{{{colours}}}{STYLE}</style>{rest}'


def gain(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Asynchronous over synchronous: tokens a second, and what the final rewards of all seeds are."""
    mean = {mode: statistics.fmean(one["tokens_s"] for one in runs if one["mode"] == mode) for mode in MODES}
    final = {mode: [one["reward_last"] if one["score"] is None else one["score"] for one in runs if one["mode"] == mode]
             for mode in MODES}
    return {"gain": mean["asynchronous"] / mean["synchronous"], "final": final}


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("recipe", nargs="?", default="grpo-smollm2")
    words.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    words.add_argument("--steps", type=int, default=30)
    words.add_argument("--skip", type=int, default=3)
    words.add_argument("--staleness", type=int, default=2)
    words.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    words.add_argument("--out", type=Path, default=Path("build/async_gain"))
    words.add_argument("--deadline-s", type=float, default=1800.0, help="of one run")
    wanted = words.parse_args()
    wanted.out.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    failed = False
    for seed in wanted.seeds:
        for mode in MODES:
            try:
                runs.append(run(mode, seed, wanted))
            except Failed as error:
                failed = True
                print(error, flush=True)
                continue
            print(table(runs[-1:]).splitlines()[-1], flush=True)
            (wanted.out / "async_gain.json").write_text(json.dumps({"runs": runs}, indent=1))
    if {one["mode"] for one in runs} != set(MODES):
        print("async_gain: nothing to compare")
        return 1
    found = gain(runs)
    (wanted.out / "async_gain.svg").write_text(drawing(runs))
    (wanted.out / "async_gain.json").write_text(json.dumps({"runs": runs, **found}, indent=1))
    print(table(runs))
    print(f"gain {found['gain']:.2f} (wanted {WANTED}); final: {found['final']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
