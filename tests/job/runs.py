"""Whole jobs for tests: a recipe that is done in seconds, started as a person would start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.actors.ledger import Ledger
from tests.waiting import eventually

TINY = """
base = "grpo-arithmetic"
[run]
name = "tiny"
steps = 6
checkpoint_every = 2
eval_every = 0
[data]
prompts_per_step = 8
[rollout]
count = 1
threads = 1
samples_per_prompt = 4
chunk_prompts = 4
[policy]
model = "tiny:qwen3?hidden=32&layers=1&heads=2&kv_heads=1&intermediate=64&vocab=32&positions=32"
sft_steps = 4
sft_batch = 16
grpo.kl_coefficient = 0.001
threads = 1
[reference]
threads = 1
"""
COMMAND = (sys.executable, "-m", "cosmos_actor.cli")
START_S = 90.0
"""A cold start of every process on two busy cores."""
JOB_S = 180.0
LOSSES = ("loss/total", "reward/mean", "entropy", "kl/reference")


class Run:
    """One run directory and the processes that work in it."""

    def __init__(self, folder: Path, popen: Callable[..., subprocess.Popen[Any]], name: str = "run") -> None:
        self.directory = folder / name
        self.recipe = folder / "tiny.toml"
        self.recipe.write_text(TINY)
        self._popen = popen
        self.output = folder / f"{name}.out"

    def command(self, *options: str, sets: Sequence[str] = ()) -> list[str]:
        flags = [part for item in sets for part in ("--set", item)]
        return [*COMMAND, "up", str(self.recipe), "--run-dir", str(self.directory), *options, *flags]

    def start(self, *options: str, sets: Sequence[str] = (), through: Callable[[list[str]], list[str]] = list
              ) -> subprocess.Popen[Any]:
        """`up` in the background; its output goes to a file."""
        with self.output.open("ab") as output:
            return self._popen(through(self.command(*options, sets=sets)), stdout=output, stderr=output,
                               stdin=subprocess.DEVNULL, env=environment())

    def finish(self, *options: str, sets: Sequence[str] = ()) -> None:
        """`up` to its end; the test fails with its output unless it exits with 0."""
        self.wait(self.start(*options, sets=sets))

    def wait(self, process: subprocess.Popen[Any], *, code: int = 0, within_s: float = JOB_S) -> None:
        assert process.wait(within_s) == code, self.output.read_text()

    def stop_with_all_trained(self, process: subprocess.Popen[Any]) -> None:
        """Two more steps, a stop, and of all that was ever asked for nothing is left or was dropped."""
        self.until_step(self.step + 2)
        process.send_signal(signal.SIGTERM)
        self.wait(process)
        balance = self.balance()
        assert balance["balanced"] and balance["in_flight"] == balance["buffered"] == 0 and not balance["dropped"]
        assert balance["trained"] == (self.step - 4) * 8 * 4  # after the SFT steps, prompts times samples

    def until_step(self, step: int) -> None:
        eventually(lambda: self.step >= step, f"step {step} of {self.directory.name}", within_s=START_S + JOB_S)

    @property
    def step(self) -> int:
        return max((line["step"] for line in self.metrics()), default=0)

    def metrics(self) -> list[dict[str, Any]]:
        return read_json_lines(self.directory / "metrics.jsonl")

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = read_json_lines(self.directory / "events.jsonl")
        return [line for line in lines if line["event"] == name]

    def losses(self) -> list[tuple[Any, ...]]:
        """What must be equal to the last bit between two ways of running one job."""
        return [(line["step"], *(line.get(name) for name in LOSSES)) for line in self.metrics() if "loss/total" in line]

    def balance(self) -> dict[str, Any]:
        with Ledger(self.directory / "ledger.sqlite", read_only=True) as ledger:
            return ledger.balance()

    def pid(self, actor: str) -> int:
        """The living process of `actor`."""
        return eventually(lambda: self._living(actor), f"a living process of {actor}", within_s=START_S)

    def _living(self, actor: str) -> int | None:
        started = [event for event in self.events("started") if event["actor"] == actor]
        return started[-1]["pid"] if started and psutil.pid_exists(started[-1]["pid"]) else None

    def head(self) -> str:
        def address() -> str | None:
            path = self.directory / "status.json"
            return json.loads(path.read_text())["head"] if path.exists() else None

        return eventually(address, "the head's address in status.json", within_s=START_S)

    def processes(self) -> list[psutil.Process]:
        """Every process that has this run directory on its command line."""
        return [process for process in psutil.process_iter() if str(self.directory) in _command_line(process)]


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))
