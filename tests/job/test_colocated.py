"""Whole jobs whose policy and rollouts have one device in turn: the same losses to the last bit, whatever befalls them.

Here the device is the CPU: what is parked or asleep has no memory there all the same, and the words are the same.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from cosmos_actor.recipes.plan import TURNS_ANYWHERE
from tests.job.runs import START_S, Run
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PHASES = ("park", "wake", "take", "cache", "sleep", "unpark")
TOLERANT = ("supervisor.intensity=100", "supervisor.poison_deaths=100", "supervisor.back_off_most_s=0.5")
"""So many deaths are nobody's fault."""
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
    balance = run.balance()
    assert run.losses() == turns.losses() and handed_over(run)
    assert balance["balanced"] and balance["trained"] == turns.balance()["trained"] and balance["in_flight"] == 0
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


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_on_one_gpu_the_device_never_has_more_than_the_larger_side_and_the_numbers_are_the_same():
    """The program that a machine without the rest of the suite's packages runs by itself."""
    done = subprocess.run([sys.executable, "-m", "tests.trainer.turns_on_a_gpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_on_one_gpu_a_job_says_how_much_of_it_each_side_had(tmp_path, popen):
    found = {}
    for offload in ("true", "false"):
        run = Run(tmp_path, popen, offload)
        run.finish(sets=["policy.device=cuda", "rollout.device=cuda", f"run.colocated_offload={offload}",
                         'policy.model="tiny:qwen3?hidden=1024&layers=16&heads=8&kv_heads=8&intermediate=4096&vocab=32&positions=32"'])
        found[offload] = run
    trained = [line for line in found["true"].metrics() if "staleness/max" in line]
    weights = trained[0]["weights/bytes"]
    for line in trained[1:]:
        assert line["memory/policy_peak_bytes"] > 3 * weights and line["memory/rollout_peak_bytes"] > weights
        for side in ("policy", "rollout"):  # two contexts, and nothing of the other side
            assert line[f"memory/{side}_used_bytes"] < line[f"memory/{side}_peak_bytes"] * 1.05 + (2 << 30)
    assert handed_over(found["true"])
    assert not any("memory/rollout_peak_bytes" in line for line in found["false"].metrics())
    assert "GPU policy " in found["true"].output.read_text()


@pytest.mark.heavy
@pytest.mark.timeout(1500)
def test_whoever_is_killed_in_whichever_part_of_a_hand_over_changes_no_loss(tmp_path, popen, turns, monkeypatch):
    """One job, and each of policy, rollout and controller killed in each part."""
    victims = [victim for _ in PHASES for victim in ("policy", "rollout", "controller")]
    strokes = [f"{PHASES[at // 3]}:{victim}:kill" for at, victim in enumerate(victims)]
    steps, alone, run = f"run.steps={2 * len(strokes) + 6}", Run(tmp_path, popen, "alone"), Run(tmp_path, popen)
    alone.finish("--inproc", sets=[steps, "run.colocated_offload=false"])
    monkeypatch.setenv("STROKES", ",".join(strokes))
    run.wait(run.start(sets=[STRUCK, steps, *TOLERANT]), within_s=1200)
    assert [event["actor"] for event in run.events("restarting")] == [f"{victim}-0" for victim in victims]
    assert all(event["reason"] == "killed by SIGKILL" for event in run.events("restarting"))
    assert run.losses() == alone.losses() and run.balance()["balanced"] and run.balance()["in_flight"] == 0


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_job_that_is_stopped_in_each_part_of_a_hand_over_and_resumed_gives_the_same_losses(
        tmp_path, popen, turns, monkeypatch):
    steps, alone, run = f"run.steps={2 * len(PHASES) + 6}", Run(tmp_path, popen, "alone"), Run(tmp_path, popen)
    alone.finish("--inproc", sets=[steps, "run.colocated_offload=false"])
    monkeypatch.setenv("STROKES", ",".join(f"{phase}:job:stop" for phase in PHASES))
    for at in range(len(PHASES) + 1):
        run.finish(*(["--resume"] if at else []), sets=[] if at else [STRUCK, steps])
        assert run.processes() == [] and (run.step == alone.step) is (at == len(PHASES))
    assert run.losses() == alone.losses() and run.balance()["balanced"]


def test_a_rollout_that_is_frozen_before_it_left_is_named_and_the_policy_does_not_come_beside_it(
        run, turns, monkeypatch):
    monkeypatch.setenv("STROKES", "sleep:rollout:freeze")
    begun = run.start(sets=[STRUCK, "run.deadline_s=20", "supervisor.heartbeat_s=300"])
    eventually(lambda: (run.directory / "struck").exists(), "the stroke", within_s=START_S)
    struck, step = time.monotonic(), run.step
    run.wait(begun, code=1)
    assert time.monotonic() - struck < 60 and run.step == step
    said = run.output.read_text()
    assert "rollout-0 is stuck" in said
    assert "s for rollout-0 to end what is in flight and leave the GPU (setting `run.deadline_s`)" in said


def test_a_frozen_rollout_that_the_supervisor_ends_holds_the_policy_up_until_then_and_changes_no_loss(
        run, turns, monkeypatch):
    monkeypatch.setenv("STROKES", "sleep:rollout:freeze")
    run.finish(sets=[STRUCK, "supervisor.heartbeat_s=5"])
    assert run.losses() == turns.losses() and run.balance()["balanced"]
    assert [event["actor"] for event in run.events("restarting")] == ["rollout-0"]
