"""The registry of a running job is killed, and stopped: the job goes on meanwhile and ends as if nothing had happened.

A joined actor that was cut off, and one whose run was killed and resumed, come back by themselves.
"""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from cosmos_actor.actors.json_lines import read_json_lines
from tests.job.runs import START_S, Run
from tests.job.test_whole_job import join_command, rollouts_that_answered
from tests.waiting import eventually, stop

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

ACTORS = {"controller-0", "data-0", "reward-0", "reference-0", "rollout-0", "replay_buffer-0", "policy-0"}
REBUILT_S = 10.0


def heard(run: Run, since: float) -> set[str]:
    """Members whose status the present registry has had, once it wrote one after `since`."""
    status = json.loads((run.directory / "status.json").read_text())
    if status["time"] <= since:
        return set()
    return {member["actor"] for member in status["members"] if "status_s" in member}


def ready_at(run: Run) -> list[float]:
    """When each registry of the run was ready."""
    return [event["time"] for event in run.events("ready") if event["actor"] == "registry-0"]


def assert_rebuilt(run: Run, number: signal.Signals) -> None:
    """End the registry once everybody is with it."""
    eventually(lambda: heard(run, 0.0) == ACTORS, "everybody in status.json", within_s=START_S)
    before, lives = run.step, len(ready_at(run))
    os.kill(run.pid("registry-0"), number)
    killed_at = time.time()
    eventually(lambda: heard(run, killed_at) == ACTORS, "everybody with the next registry", within_s=START_S)
    now = time.time()
    print(f"\neverybody is back {now - killed_at:.1f} s after the kill, {run.step - before} steps later")
    eventually(lambda: len(ready_at(run)) > lives, "word that it is ready", within_s=START_S)
    assert now - ready_at(run)[-1] < REBUILT_S, "its own part, without the start of its interpreter"
    run.until_step(before + 1)


def test_a_killed_registry_is_rebuilt_in_time_while_steps_go_on(run, uninterrupted):
    """The losses are those of a run that nobody disturbed, and no actor but the registry was started again."""
    process = run.start(sets=["run.steps=300", "run.checkpoint_every=100"])
    run.until_step(6)
    for number in (signal.SIGKILL, signal.SIGTERM):
        assert_rebuilt(run, number)
    process.send_signal(signal.SIGTERM)
    run.wait(process)
    assert [event["actor"] for event in run.events("restarting")] == ["registry-0"] * 2
    assert not run.events("rewind") and not run.events("departed")
    assert run.losses()[:10] == uninterrupted.losses() and run.balance()["balanced"]
    gone = [record for record in read_json_lines(run.directory / "registry.jsonl") if "gone" in record]
    assert all("goodbye" in record["reason"] or "stopped" in record["reason"] for record in gone), gone


def test_a_stopped_registry_is_replaced_and_a_job_that_ends_meanwhile_ends_well(run):
    process = run.start(sets=["run.steps=30"])
    run.until_step(6)
    pid = run.pid("registry-0")
    stop(pid)
    run.wait(process)
    assert [event["reason"] for event in run.events("killing")][:1][0].startswith("stuck: it takes no link")
    assert "registry-0" in {event["actor"] for event in run.events("restarting")}
    assert run.step == 34 and run.balance()["balanced"] and not run.processes()


def test_a_joined_rollout_that_was_cut_off_comes_back_as_a_new_life(run, popen, tmp_path):
    process = run.start(sets=["run.steps=20000", "rollout.chunk_prompts=2", "bus.lost_after_s=3",
                              "run.checkpoint_every=1000000"])
    run.until_step(5)
    told = tmp_path / "joined.out"
    with told.open("wb") as output:
        joined = popen([*join_command(run), "--name", "rollout-far"], stderr=output)
    eventually(lambda: "rollout-far" in rollouts_that_answered(run), "an answer of it", within_s=START_S)
    stop(joined.pid)
    eventually(lambda: run.events("departed"), "word that it is gone", within_s=START_S)
    os.kill(joined.pid, signal.SIGCONT)
    eventually(lambda: len(run.events("joined")) == 2, "its second life", within_s=START_S)
    step = run.step
    eventually(lambda: any(line["step"] > step and line.get("answers/rollout-far") for line in run.metrics()),
               "an answer of its second life", within_s=START_S)
    assert "joining again" in told.read_text()
    joined.send_signal(signal.SIGINT)
    assert joined.wait(START_S) == 0
    process.send_signal(signal.SIGTERM)
    run.wait(process)
    balance = run.balance()
    assert balance["balanced"] and balance["in_flight"] == 0 and balance["trained"] == (run.step - 4) * 8 * 4


def test_a_joined_rollout_outlives_a_killed_run_and_serves_the_resumed_one(run, popen):
    process = run.start(sets=["run.steps=400", "rollout.chunk_prompts=2", "bus.lost_after_s=3"])
    run.until_step(7)
    address = run.head()
    joined = popen([*join_command(run), "--name", "rollout-far"])
    eventually(lambda: "rollout-far" in rollouts_that_answered(run), "an answer of it", within_s=START_S)
    process.kill()
    eventually(lambda: not [one for one in run.processes() if one.pid != joined.pid], "the end of the run's own",
               within_s=5.0)
    assert joined.poll() is None
    resumed = run.start("--resume", "--listen", address)
    eventually(lambda: len(run.events("joined")) == 2, "its second life", within_s=START_S)
    resumed.send_signal(signal.SIGTERM)
    run.wait(resumed)
    assert joined.wait(START_S) == 0, "the run told it that it is over"
    assert run.balance()["balanced"]
