"""Whole jobs whose policy and rollouts have one device in turn: the same losses to the last bit, whatever befalls them.

Here the device is the CPU: what is parked or asleep has no memory there all the same, and the words are the same.
"""

from __future__ import annotations

import time

import pytest

from cosmos_actor.recipes.plan import TURNS_ANYWHERE
from tests.job.runs import START_S, Run
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PHASES = ("park", "wake", "take", "cache", "sleep", "unpark")
STRUCK = 'run.loop="tests.job.turn_strokes:run"'


@pytest.fixture
def turns(uninterrupted: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """From here on jobs take turns; the job without, to compare with."""
    monkeypatch.setenv(TURNS_ANYWHERE, "1")
    return uninterrupted


def handed_over(run: Run) -> bool:
    trained = [line for line in run.metrics() if "staleness/max" in line]
    return bool(trained) and all(line["time/hand_off"] > 0 for line in trained)


@pytest.mark.parametrize("sets", [
    ("rollout.sleep_level=1",),
    ("rollout.count=2", "rollout.chunk_prompts=4", "run.eval_every=2", "data.eval_problems=4"),
    ("weights.keep=1", "rollout.on_new_weights=recompute"),
], ids=["level 1", "two rollouts and evaluations", "one version kept"])
def test_a_job_that_takes_turns_gives_the_same_losses(run, turns, sets):
    run.finish(sets=sets)
    assert run.losses() == turns.losses() and run.balance() == turns.balance() and handed_over(run)
    assert not any("hand_off" in name for line in turns.metrics() for name in line)


def test_in_one_process_too_with_an_adapter(tmp_path, popen, turns):
    pytest.importorskip("peft")
    found = {}
    for offload in ("true", "false"):
        run = Run(tmp_path, popen, offload)
        run.finish("--inproc", sets=["policy.lora.rank=4", f"run.colocated_offload={offload}"])
        found[offload] = run.losses()
        assert handed_over(run) if offload == "true" else True
    assert found["true"] == found["false"]


def test_two_ranks_take_their_turn_together(tmp_path, popen, turns):
    found = {}
    for offload in ("true", "false"):
        run = Run(tmp_path, popen, offload)
        run.finish(sets=["policy.ranks=2", f"run.colocated_offload={offload}"])
        found[offload] = run.losses()
    assert found["true"] == found["false"]


@pytest.mark.heavy
@pytest.mark.parametrize("victim", ["policy", "rollout", "controller"])
@pytest.mark.parametrize("phase", PHASES)
def test_one_that_is_killed_in_the_midst_of_a_hand_over_changes_no_loss(run, turns, monkeypatch, phase, victim):
    monkeypatch.setenv("STROKE", f"{phase}:{victim}:kill")
    process = run.start(sets=[STRUCK])
    [restart] = eventually(lambda: run.events("restarting"), f"the restart of {victim}-0", within_s=START_S)
    assert restart["actor"] == f"{victim}-0" and restart["reason"] == "killed by SIGKILL"
    run.wait(process)
    assert run.losses() == turns.losses() and run.balance()["balanced"]
    assert [event["actor"] for event in run.events("restarting")] == [f"{victim}-0"]


@pytest.mark.heavy
@pytest.mark.parametrize("phase", PHASES)
def test_a_job_that_is_stopped_in_the_midst_of_a_hand_over_and_resumed_gives_the_same_losses(
        run, turns, monkeypatch, phase):
    monkeypatch.setenv("STROKE", f"{phase}:job:stop")
    run.finish(sets=[STRUCK])
    assert 7 <= run.step < 10 and run.processes() == []
    run.finish("--resume")
    assert run.losses() == turns.losses() and run.balance()["balanced"]


@pytest.mark.parametrize("phase", ["sleep", "wake"])
def test_a_rollout_that_is_frozen_in_its_part_is_named(run, turns, monkeypatch, phase):
    monkeypatch.setenv("STROKE", f"{phase}:rollout:freeze")
    begun = run.start(sets=[STRUCK, "run.deadline_s=20", "supervisor.heartbeat_s=300"])
    eventually(lambda: (run.directory / "struck").exists(), "the stroke", within_s=START_S)
    struck = time.monotonic()
    run.wait(begun, code=1)
    assert time.monotonic() - struck < 60
    assert "for rollout-0 to " in run.output.read_text().splitlines()[-2]
