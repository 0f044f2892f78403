"""A whole job, from the command line: as processes, in one process, over two hosts, interrupted and resumed.

The losses are the same to the last bit, whichever way it runs.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest

from cosmos_actor.actors.json_lines import read_json_lines
from tests.job.runs import COMMAND, START_S, Run, environment, shared_memory
from tests.netns import skip_reason, two_hosts
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROLES = ("controller", "data", "policy", "reference", "replay_buffer", "reward", "rollout")


def test_a_job_ends_with_every_step_and_a_balanced_ledger(uninterrupted):
    assert [line["step"] for line in uninterrupted.metrics() if "loss/total" in line] == list(range(1, 11))
    assert uninterrupted.balance() == {"dispatched": 6 * 8 * 4, "trained": 6 * 8 * 4, "dropped": {}, "buffered": 0,
                                       "in_flight": 0, "balanced": True}
    assert (uninterrupted.directory / "report.html").read_text().startswith("<!doctype html>")
    assert uninterrupted.processes() == []


def test_every_role_is_a_process_of_its_own(uninterrupted):
    started = {event["role"]: event["pid"] for event in uninterrupted.events("started")}
    assert sorted(started) == sorted([*ROLES, "registry"]) and len(set(started.values())) == len(started)


def test_inproc_gives_the_same_losses(run, uninterrupted):
    run.finish("--inproc")
    assert run.losses() == uninterrupted.losses()


def test_a_policy_of_two_ranks_gives_the_same_losses_but_for_the_order_of_sums(run, uninterrupted):
    run.finish(sets=["policy.ranks=2"])
    for ranked, alone in zip(run.losses(), uninterrupted.losses(), strict=True):
        assert ranked[:1] == alone[:1] and ranked[1:] == pytest.approx(alone[1:], abs=2e-5)


def test_arrays_by_reference_give_the_same_losses(run, uninterrupted):
    run.finish(sets=["bulk.threshold_bytes=1"])
    assert run.losses() == uninterrupted.losses()


@pytest.mark.parametrize("way", ["stream", "directory"])
def test_whichever_way_weights_travel_the_losses_are_the_same(run, uninterrupted, way):
    run.finish(sets=[f"weights.transport={way}", "weights.protection=trusted", "weights.fan_out=never",
                     *([f"weights.directory={run.directory}/versions"] if way == "directory" else [])])
    assert run.losses() == uninterrupted.losses()
    said = [path.read_text() for path in (run.directory / "logs" / "rollout-0").iterdir()]
    assert any(f"weights come by {way}: " in text for text in said)


@pytest.mark.parametrize("faults", [
    "drop=0.01,dup=0.01,delay=50ms,partition=rollout:5s@8s",
    "drop=0.05,dup=0.05,reorder=0.05,corrupt=0.01,partition=policy:2s@9s",
])
def test_a_bad_network_changes_no_loss(run, uninterrupted, faults):
    run.finish("--faults", faults)
    assert run.losses() == uninterrupted.losses()
    assert run.balance() == uninterrupted.balance()


def test_a_bad_network_changes_no_loss_inproc(run, uninterrupted):
    run.finish("--inproc", "--faults", "drop=0.02,dup=0.02,delay=5ms")
    assert run.losses() == uninterrupted.losses() and run.balance()["balanced"]


def test_samples_ahead_of_the_weights_survive_a_rewind(run):
    """Two rollouts, samples asked for two steps ahead, and a policy that dies in between."""
    process = run.start(sets=["run.max_staleness=2", "rollout.count=2", "rollout.chunk_prompts=2", "run.steps=20"])
    run.until_step(9)
    os.kill(run.pid("policy-0"), signal.SIGKILL)
    run.wait(process)
    trained = [line for line in run.metrics() if "staleness/max" in line]
    balance = run.balance()
    assert [line["step"] for line in trained] == list(range(5, 25))
    assert max(line["staleness/max"] for line in trained) <= 2
    assert balance["balanced"] and balance["trained"] == 20 * 8 * 4 and balance["in_flight"] == balance["buffered"] == 0
    assert [event["reason"].partition(" ")[0] for event in run.events("rewind")] == ["policy-0"]


def test_a_job_that_was_stopped_and_resumed_gives_the_same_losses(run, uninterrupted):
    process = run.start()
    run.until_step(7)
    process.send_signal(signal.SIGTERM)
    run.wait(process)
    stopped_at = run.step
    assert 7 <= stopped_at < 10 and run.processes() == []
    run.finish("--resume")
    assert run.losses() == uninterrupted.losses() and run.balance()["balanced"]


def test_a_job_whose_supervisor_was_killed_leaves_nothing_and_resumes_to_the_same_losses(run, uninterrupted):
    shared_before = shared_memory()
    process = run.start()
    run.until_step(7)
    process.kill()
    eventually(lambda: not run.processes(), "the end of every process of the job", within_s=5.0)
    assert shared_memory() <= shared_before
    run.finish("--resume")
    assert run.losses() == uninterrupted.losses() and run.balance()["balanced"]


@pytest.mark.netns
@pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))
def test_two_hosts_give_the_same_losses(tmp_path, uninterrupted):
    """The rollout is on another host: trajectories and weights cross a network, arrays as streams."""
    with two_hosts() as (head, other):
        run = Run(tmp_path, head.popen)
        process = run.start(sets=["rollout.count=0", f'bus.host="{head.address}"', "bulk.threshold_bytes=1"])
        joined = other.popen(join_command(run), env=environment())
        run.wait(process)
        assert joined.wait(START_S) == 0
    assert run.losses() == uninterrupted.losses()
    assert [event["actor"].split("-")[0] for event in run.events("joined")] == ["rollout"]


def join_command(run: Run) -> list[str]:
    return [*COMMAND, "start", "--role", "rollout", "--connect", run.head(),
            "--key", str(run.directory / "keys" / "rollout.key")]


def test_an_actor_that_joins_is_used_and_may_leave_again(run, popen, tmp_path):
    process = run.start(sets=["run.steps=2000", "rollout.chunk_prompts=2"])
    run.until_step(5)
    told = tmp_path / "joined.out"
    with told.open("wb") as output:
        joined = popen(join_command(run), env=environment(), stderr=output)
    eventually(lambda: "ready for work" in told.read_text(), "the word of the joined rollout", within_s=START_S)
    [event] = eventually(lambda: run.events("joined"), "the rollout that joined", within_s=START_S)
    written = eventually(lambda: rollouts_that_answered(run) - {"rollout-0"}, "an answer of the joined rollout",
                         within_s=START_S)
    assert written == {event["actor"]}
    joined.send_signal(signal.SIGINT)
    assert joined.wait(START_S) == 0
    run.stop_with_all_trained(process)


def test_a_joined_actor_that_is_killed_is_found_within_three_seconds(run, popen, uninterrupted):
    process = run.start(sets=["run.steps=400", "rollout.chunk_prompts=2"])
    run.until_step(5)
    joined = popen(join_command(run), env=environment())
    [event] = eventually(lambda: run.events("joined"), "the rollout that joined", within_s=START_S)
    step = run.step
    eventually(lambda: event["actor"] in rollouts_that_answered(run), "an answer of it", within_s=START_S)
    joined.kill()
    killed_at = time.time()
    [departed] = eventually(lambda: run.events("departed"), "word of its end", within_s=START_S)
    assert departed["time"] - killed_at < 3 and "its process is gone" in departed["reason"]
    run.until_step(max(step, run.step) + 2)
    process.send_signal(signal.SIGTERM)
    run.wait(process)
    assert run.balance()["balanced"] and run.balance()["in_flight"] == 0


def rollouts_that_answered(run: Run) -> set[str]:
    """Actors of whom the metrics count an answer; one that is still being made is there with none."""
    return {name.rpartition("/")[2] for line in run.metrics() for name, count in line.items()
            if name.startswith("answers/rollout") and count}


def test_interpreters_are_named_in_ps(run):
    process = run.start()
    run.until_step(1)
    commands = [" ".join(child.cmdline()) for child in psutil.Process(process.pid).children(recursive=True)]
    roles = [role for role in ROLES if any(f"--role {role}" in command for command in commands)]
    assert roles == list(ROLES) and all(sys.executable in command for command in commands if "--role" in command)
    os.kill(process.pid, signal.SIGTERM)
    run.wait(process)


def test_the_events_tell_the_whole_story(uninterrupted):
    events = read_json_lines(uninterrupted.directory / "events.jsonl")
    assert [event["event"] for event in events][-1] == "ended" and events[-1]["kind"] == "finished"
