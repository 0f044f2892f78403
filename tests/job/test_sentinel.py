"""A real job with a stopped process, a handler that sleeps and C code that holds the interpreter lock: each is reported
within seconds, `cosmos-actor why` names it, and a standstill leaves every actor's stacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.job.misbehaving import ORDERS, order
from tests.job.runs import COMMAND, START_S, Run, environment
from tests.project.source import ROOT
from tests.waiting import eventually, stop

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

REPORTED_S = 60.0
"""3 s on a machine that has time; tests run on any."""
SETS = ["run.steps=100000", 'data.task="tests.job.misbehaving:make_task"', "supervisor.no_progress_s=6",
        "reward.deadline_s=300", "run.checkpoint_every=1000000", "bus.lost_after_s=100"]


class Watched:
    """A job that goes on until the module's tests are done, and what its events and `why` say."""

    def __init__(self, run: Run, orders: Path) -> None:
        self.run, self._orders = run, orders
        env = {**environment(), "PYTHONPATH": str(ROOT), ORDERS: str(orders)}
        flags = [part for item in SETS for part in ("--set", item)]
        command = [*COMMAND, "up", str(run.recipe), "--run-dir", str(run.directory), *flags]
        with run.output.open("ab") as output:
            run._popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=env)
        run.until_step(6)

    def order(self, what: str, seconds: float) -> float:
        """When the verifier took the order."""
        taken = self._orders.with_suffix(".taken")
        taken.unlink(missing_ok=True)
        order(self._orders, what, seconds)
        eventually(taken.exists, f"the order to {what}", within_s=START_S)
        return time.time()

    def release(self) -> None:
        """Let a verifier that sleeps go on."""
        self._orders.with_suffix(".taken").unlink()

    def report(self, kind: str, actor: str, since: float) -> dict[str, Any]:
        """The event that says so."""
        def look() -> dict[str, Any] | None:
            return next((event for event in self.run.events("stuck") if event["time"] >= since - 0.1
                         and (event["kind"], event["actor"]) == (kind, actor)), None)

        found = eventually(look, f"the report that {actor} is {kind}", within_s=REPORTED_S)
        print(f"\n{kind} {actor}: reported after {found['time'] - since:.2f} s: {found['reason']}")
        return found

    def goes_on(self, actor: str, since: float) -> None:
        eventually(lambda: [event for event in self.run.events("goes_on")
                            if event["time"] > since and event["actor"] == actor], f"{actor} going on", within_s=60.0)

    def standstill(self, why: str, since: float) -> dict[str, Any]:
        """The event of one whose cause begins so."""
        def look() -> dict[str, Any] | None:
            return next((event for event in self.run.events("standstill")
                         if event["time"] > since and event["why"].startswith(why)), None)

        return eventually(look, f"a standstill because {why}", within_s=60.0)

    def why(self) -> dict[str, Any]:
        done = subprocess.run([*COMMAND, "why", str(self.run.directory), "--json"], capture_output=True, text=True,
                              timeout=60, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
        print("\n".join(answer["lines"]))
        return answer


@pytest.fixture(scope="module")
def watched(tmp_path_factory, module_popen) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    yield Watched(Run(folder, module_popen), folder / "orders")


def why_until(watched: Watched, cause: str, line: str) -> dict[str, Any]:
    """`why` once it has this cause first and a line that begins so: status.json is up to a second old."""
    def look() -> dict[str, Any] | None:
        answer = watched.why()
        said = any(text.startswith(f"  {cause} {line}") for text in answer["lines"])
        return answer if said and answer.get("causes", [])[:1] == [cause] else None

    return eventually(look, f"{cause} as the first cause, which {line}", within_s=REPORTED_S)


def test_a_stopped_process_is_reported_and_named(watched):
    pid = watched.run.pid("rollout-0")
    begun = time.time()
    stop(pid)
    try:
        reason = watched.report("silent", "rollout-0", begun)["reason"]
        assert f"process {pid} is stopped by a signal" in reason
        answer = why_until(watched, "rollout-0", "gave no heartbeat for")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert any(wait["by"] == "controller-0" and wait["on"] == ["rollout-0"] for wait in answer["waits"])
    assert any(line.startswith("  rollout-0 gave no heartbeat for") and "stopped by a signal" in line
               and "waited for by controller-0" in line for line in answer["lines"])
    watched.goes_on("rollout-0", begun)


def test_a_handler_that_sleeps_is_reported_and_a_standstill_leaves_all_stacks(watched):
    begun = watched.order("sleep", 250.0)
    assert "score makes no progress" in watched.report("blocked", "reward-0", begun)["reason"]
    why_until(watched, "reward-0", "is blocked in score")
    standstill = watched.standstill("reward-0 is blocked in score", begun)
    stacks = {file.split("/")[1]: (watched.run.directory / file).read_text() for file in standstill["stacks"]}
    assert set(stacks) == {"supervisor.stacks.txt", "registry-0", "controller-0", "data-0", "reward-0",
                           "replay_buffer-0", "reference-0", "policy-0", "rollout-0"}
    assert all("most recent call first" in text for text in stacks.values())
    assert "misbehaving.py" in stacks["reward-0"] and "in reward" in stacks["reward-0"]
    watched.release()
    watched.goes_on("reward-0", begun)


def test_code_that_holds_the_interpreter_lock_is_reported_and_its_stacks_are_written(watched):
    begun = watched.order("hold", 8.5)
    assert "no heartbeat for" in watched.report("silent", "reward-0", begun)["reason"]
    standstill = watched.standstill("reward-0 gave no heartbeat", begun)
    [file] = [name for name in standstill["stacks"] if "/reward-0/" in name]
    assert "hold_the_lock" in (watched.run.directory / file).read_text()
    watched.goes_on("reward-0", begun)


def test_a_computation_that_uses_a_cpu_is_not_reported(watched):
    watched.run.until_step(watched.run.step + 2)  # the call that held the lock has ended: this is another's time
    begun = watched.order("spin", 5.0)
    watched.run.until_step(watched.run.step + 2)
    assert [event for event in watched.run.events("stuck")
            if event["time"] > begun and event["kind"] == "blocked"] == []


def test_where_it_is_asked_for_a_handler_that_never_returns_is_killed_and_the_job_goes_on(tmp_path, popen):
    orders = tmp_path / "orders"
    order(orders, "sleep", 3600.0)
    run = Run(tmp_path, popen)
    process = popen(
        run.command(sets=['data.task="tests.job.misbehaving:make_task"', "supervisor.on_stuck=kill",
                          "supervisor.heartbeat_s=10", "reward.deadline_s=300"]),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        env={**environment(), "PYTHONPATH": str(ROOT), ORDERS: str(orders)})
    run.wait(process)
    [killing] = run.events("killing")
    assert killing["actor"] == "reward-0" and killing["reason"].startswith("stuck: score makes no progress for 1")
    assert [event["actor"] for event in run.events("restarting")] == ["reward-0"]
    assert run.step == 10 and run.balance()["balanced"]


def test_a_stop_does_not_wait_for_a_step_that_a_silent_role_can_not_finish(tmp_path, popen):
    run = Run(tmp_path, popen)
    process = run.start(sets=["run.steps=100000", "run.checkpoint_every=1000000"])
    run.until_step(6)
    stop(run.pid("rollout-0"))
    eventually(lambda: run.events("stuck"), "the report of rollout-0", within_s=REPORTED_S)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60.0) == 0, run.output.read_text()
    print(f"\nstopped after {time.monotonic() - begun:.1f} s")
    [stopping] = run.events("stopping")
    assert "no actor of role rollout answers, so the step in hand can not be finished" in stopping["reason"]
    assert run.processes() == []
