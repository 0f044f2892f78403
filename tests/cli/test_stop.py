"""`stop` asks, waits for a bounded time, kills, and says how many processes it was about."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.conftest import Cli
from tests.cli.sample_run import make_run

SUPERVISOR = """
import json, signal, subprocess, sys, time
from cosmos_actor.actors.run_directory import RunDirectory
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.recipes.resolved import resolved_text

stubborn = sys.argv[2] == "stubborn"
settings = resolve("grpo-arithmetic", ["supervisor.drain_s=1", "supervisor.stop_s=1"])
run = RunDirectory.create(sys.argv[1], "d", run_id="x", resolved=resolved_text(settings))
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
run.writer(run.events).append({"time": time.time(), "event": "started", "actor": "rollout-0", "pid": child.pid,
                               "interpreter": sys.executable})

def stop(number, frame):
    child.kill()
    child.wait()
    sys.exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else stop)
print("up", flush=True)
while True:
    signal.pause()
"""


@contextmanager
def supervisor(run: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run directory and one child, which ends when it does."""
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(run), kind], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_job_that_obeys_is_stopped_and_counted(cli: Cli, here: Path) -> None:
    with supervisor(here / "run", "willing") as process:
        answer = cli("stop", "run", "--json")
        assert answer.code == 0
        result = json.loads(answer.out)
        assert (result["stopped"], result["killed"], result["processes_ended"], result["processes_left"]) == (
            True, False, 2, 0)
        assert process.wait(timeout=10) == 0


def test_a_job_that_does_not_is_killed_at_the_deadline_and_that_is_no_success(cli: Cli, here: Path) -> None:
    with supervisor(here / "run", "stubborn"):
        begun = time.monotonic()
        answer = cli("stop", "run", "--deadline", "0.5")
        assert time.monotonic() - begun < 8
        assert answer.code == 1
        assert "killed in" in answer.out and "2 processes ended, 0 left" in answer.out


def test_stopping_now_may_kill(cli: Cli, here: Path) -> None:
    with supervisor(here / "run", "stubborn"):
        assert cli("stop", "run", "--now", "--deadline", "0.3").code == 0


def test_what_is_not_running_is_left_alone(cli: Cli, here: Path) -> None:
    make_run(here / "run", metrics=[])
    answer = cli("stop", "run")
    assert (answer.code, "it was not running" in answer.out) == (0, True)
