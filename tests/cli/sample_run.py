"""A run directory as a finished job would leave it, made without running one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from cosmos_actor.actors.ledger import Ledger
from cosmos_actor.actors.run_directory import RunDirectory
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.recipes.resolved import resolved_text
from cosmos_actor.recipes.settings import digest

ROLES = ("controller", "data", "reward", "replay_buffer", "reference", "policy", "rollout")


def metrics_lines(sft: int = 20, grpo: int = 100) -> list[dict[str, object]]:
    """A learning curve with noise, the same on every call."""
    noise = np.random.default_rng(0)
    lines, time = [], 0.0
    for step in range(1, sft + grpo + 1):
        wall = 1.4 + 0.2 * noise.random()
        time += wall
        line: dict[str, object] = {"step": step, "time": round(time, 3), "time/step": round(wall, 3)}
        if step <= sft:
            loss = 2.8 * math.exp(-step / 12) + 0.05 * noise.random()
            line.update({"phase": "sft", "loss/total": loss, "grad_norm": 1.0})
        else:
            share = (step - sft) / grpo
            reward = 0.28 + 0.67 * (1 - math.exp(-3.5 * share)) + 0.03 * noise.standard_normal()
            line.update({
                "phase": "grpo", "reward/mean": min(1.0, reward), "reward/std": 0.4 * (1 - share),
                "loss/total": 0.02 * noise.standard_normal(), "loss/policy": 0.02 * noise.standard_normal(),
                "kl/reference": 0.02 * share + 0.003 * noise.random(), "entropy": 1.4 * math.exp(-2 * share) + 0.1,
                "clip/fraction": 0.02 + 0.02 * noise.random(), "grad_norm": 0.6 + 0.2 * noise.random(), "tokens": 1536,
                "tokens/s": 1000 + 90 * noise.standard_normal(), "staleness/max": int(noise.integers(0, 2)),
                "version": step, "wait/rollout": 0.5 * wall,
                "wait/policy": 0.45 * wall, "time/generate": 0.5 * wall, "time/update": 0.4 * wall})
        lines.append(line)
        if step > sft and (step - sft) % 25 == 0:
            accuracy = min(1.0, 0.3 + step / 180)
            lines.append({"step": step, "phase": "eval", "time": round(time, 3), "eval/accuracy": accuracy})
    return lines


def event_lines() -> list[dict[str, object]]:
    """Seven actors start; rollout-0 dies once and comes back."""
    lines: list[dict[str, object]] = []
    for pid, role in enumerate(ROLES, 4_000_000):
        who = {"actor": f"{role}-0", "incarnation": f"{role}a"}
        lines += [{"time": 1.0, "event": "started", **who, "pid": pid, "interpreter": "/usr/bin/python3", "start": 1},
                  {"time": 2.0, "event": "ready", **who, "after_s": 1.0}]
    who = {"actor": "rollout-0", "incarnation": "rollouta"}
    again = {"actor": "rollout-0", "incarnation": "rolloutb"}
    return [*lines, {"event": "exited", **who, "reason": "killed by SIGKILL", "outcome": "abnormal"},
            {"event": "restarting", **who, "reason": "killed by SIGKILL", "delay_s": 0.0},
            {"event": "started", **again, "pid": 4_000_100, "interpreter": "/usr/bin/python3", "start": 2},
            {"event": "ready", **again}]


def make_run(root: Path, *, metrics: list[dict[str, object]] | None = None) -> Path:
    """Lay a run out in `root` and let go of it."""
    settings = resolve("grpo-arithmetic")
    with RunDirectory.create(root, digest(settings), run_id="sample", resolved=resolved_text(settings)) as run:
        for line in metrics_lines() if metrics is None else metrics:
            run.writer(run.metrics).append(line)
        for line in event_lines():
            run.writer(run.events).append(line)
        with Ledger(run.ledger) as ledger:
            keys = [(f"g{number:06d}/0", 0) for number in range(40)]
            ledger.dispatched(keys, 1, 0)
            ledger.generated(keys[:36], 0, 0)
            ledger.trained(keys[:30], 1)
            ledger.buffered(keys[30:34])
            ledger.dropped(keys[34:36], "stale")
    return root


def append_line(path: Path, record: dict[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
