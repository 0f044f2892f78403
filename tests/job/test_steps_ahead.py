"""Jobs that ask for fragments a step ahead (`run.max_staleness`): requests overlap, and evaluations come in between."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest

from tests.job.test_simulators import SimRun
from tests.job.test_simulators import run as run  # a fixture
from tests.waiting import stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
AHEAD = ["run.max_staleness=1", "sim.count=3", "sim.envs=2", "run.eval_every=5", "sim.eval_trials=10"]
QUICK = ["supervisor.back_off_first_s=0.1", "supervisor.poison_deaths=9"]


def check_books(run: SimRun, steps: int, fragments: int) -> None:
    """Every step, fragment, episode and trial once; nothing older than it may be."""
    assert [line["step"] for line in run.metrics() if line["phase"] != "eval"] == list(range(1, steps + 1))
    assert max(line["staleness/max"] for line in run.metrics() if "staleness/max" in line) == 1
    balance = run.balance()
    assert balance["balanced"] and balance["trained"] == fragments * steps
    assert balance["in_flight"] == balance["buffered"] == 0
    trained = [episode for episode in run.episodes() if episode.get("phase") != "eval"]
    for facts in (("unit",), ("task", "seed", "initial_state", "attempt")):
        counts = Counter(tuple(episode[name] for name in facts) for episode in trained)
        assert counts and max(counts.values()) == 1
    for episode in trained:
        assert 1 <= episode["length"] <= 40 and episode["return"] <= 0.0
        assert episode["terminated"] is (episode["success"] == 1)
    for step in sorted({*range(0, steps + 1, 5), steps}):
        tried = [episode for episode in run.episodes() if episode.get("phase") == "eval" and episode["step"] == step]
        assert [(one["unit"], one["outcome"]) for one in tried] == [(f"reach/{trial}", "done") for trial in range(10)]
    assert run.processes() == []


@pytest.mark.parametrize("fragments", [4, 9])  # fewer than there are slots, and more
def test_every_episode_counts_once_and_evaluations_are_whole(run, fragments):
    run.finish(sets=[*AHEAD, f"data.prompts_per_step={fragments}", "rollout.count=2"])
    check_books(run, 12, fragments)
    assert run.balance()["dropped"] == {} and run.events("simulator_failed") == []


def test_deaths_and_a_stop_cost_no_step_and_no_episode_counts_twice(run):
    process = run.start(sets=[*AHEAD, *QUICK, "run.steps=30", "sim.silent_s=3"])
    for step, actor in ((3, "simulator-0"), (8, "rollout-0"), (13, "controller-0")):
        run.until_step(step)
        os.kill(run.pid(actor), signal.SIGKILL)
    run.until_step(16)
    process.send_signal(signal.SIGTERM)
    run.wait(process)
    assert run.processes() == [] and run.step < 30
    process = run.start("--resume")
    run.until_step(22)
    stopped = run.pid("simulator-1")
    stop(stopped)
    time.sleep(8.0)
    os.kill(stopped, signal.SIGCONT)
    run.wait(process)
    check_books(run, 30, 4)


def test_fragments_that_kill_their_rollout_are_replaced_by_others(run):
    run.finish(sets=[*AHEAD, QUICK[0], "sim.driver=tests.job.plug_ins:Deadly", "rollout.chunk_prompts=2",
                     "run.steps=6"])
    check_books(run, 6, 4)
    assert run.balance()["dropped"] == {"quarantined": 2}
