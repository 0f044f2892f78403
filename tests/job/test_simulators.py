"""Whole jobs that learn from simulators: in processes and in one, through deaths, and with some that misbehave."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from cosmos_actor.actors.json_lines import read_json_lines
from tests.job.runs import COMMAND, START_S, Run, environment
from tests.project.source import ROOT
from tests.waiting import eventually, stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RECIPE = """
[run]
loop = "ppo"
experience = "simulator"
steps = 12
checkpoint_every = 4
[data]
prompts_per_step = 4
[sim]
kind = "python:tests.job.reach:make"
count = 1
envs = 4
fragment_steps = 32
[sim.env]
PYTHONPATH = "{root}"
[bus]
lost_after_s = 10.0
"""
SILENT = ("simulator-1 gave no heartbeat for", "simulator-1 is lost to the run")
"""What `why` says of it before and after its work was given to another."""
LOSSES = ("loss/total", "loss/value", "entropy", "kl/old", "episode/return", "reward/mean")


class SimRun(Run):
    """One that learns to reach."""

    def __init__(self, folder: Any, popen: Any, name: str = "run") -> None:
        super().__init__(folder, popen, name)
        self.recipe.write_text(RECIPE.format(root=ROOT))

    def losses(self) -> list[tuple[Any, ...]]:
        return [(line["step"], *(line.get(name) for name in LOSSES)) for line in self.metrics()]

    def episodes(self) -> list[dict[str, Any]]:
        return read_json_lines(self.directory / "episodes.jsonl")

    def check_books(self, steps: int = 12) -> None:
        """Every step once, every fragment accounted for, every episode once and under one try."""
        assert [line["step"] for line in self.metrics()] == list(range(1, steps + 1))
        balance = self.balance()
        assert balance["balanced"] and balance["trained"] == 4 * steps
        assert balance["in_flight"] == balance["buffered"] == 0
        counts = Counter(episode["unit"] for episode in self.episodes())
        assert counts and max(counts.values()) == 1
        for episode in self.episodes():
            assert 1 <= episode["length"] <= 40 and episode["return"] <= 0.0
            assert episode["terminated"] is (episode["success"] == 1)


@pytest.fixture
def run(tmp_path, popen) -> SimRun:
    return SimRun(tmp_path, popen)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, module_popen) -> SimRun:
    made = SimRun(tmp_path_factory.mktemp("undisturbed"), module_popen)
    made.finish()
    return made


def test_a_job_on_simulators_ends_with_every_step_and_balanced_books(undisturbed):
    undisturbed.check_books()
    [attached] = undisturbed.events("simulator_attached")
    assert (attached["simulator"], attached["kind"]) == ("simulator-0", "python:tests.job.reach:make")
    assert undisturbed.processes() == []
    page = (undisturbed.directory / "report.html").read_text()
    assert "<h2>Episodes</h2>" in page and "<td>reach</td>" in page


def test_in_one_process_it_gives_the_same_to_the_last_bit(run, undisturbed):
    run.finish("--inproc")
    assert run.losses() == undisturbed.losses()
    run.check_books()


def test_an_evaluation_runs_every_trial_once_and_is_no_training(run):
    run.finish(sets=["run.eval_every=6", "sim.eval_trials=10", "sim.count=2", "sim.envs=2"])
    evaluations = [line for line in run.metrics() if line["phase"] == "eval"]
    assert [line["step"] for line in evaluations] == [0, 6, 12]
    for line in evaluations:
        tried = [episode for episode in run.episodes()
                 if episode.get("phase") == "eval" and episode["step"] == line["step"]]
        assert [episode["unit"] for episode in tried] == [f"reach/{trial}" for trial in range(10)]
        assert line["eval/episodes"] == 10 and line["eval/errors"] == 0
        assert line["eval/accuracy"] == pytest.approx(sum(episode["success"] for episode in tried) / 10)
    assert evaluations[-1]["eval/accuracy"] >= evaluations[0]["eval/accuracy"]
    assert run.balance()["trained"] == 4 * 12
    page = (run.directory / "report.html").read_text()
    assert "reach, evaluated after step 12" in page and "held-out accuracy" in page


def test_an_evaluation_is_filmed(run):
    pytest.importorskip("av")
    run.finish(sets=["run.steps=2", "run.eval_every=1", "sim.eval_trials=5", "sim.failed_videos=1",
                     "sim.kind=python:tests.job.paint:make", "data.prompts_per_step=1", "bulk.threshold_bytes=512"])
    tried = [episode for episode in run.episodes() if episode.get("phase") == "eval"]
    for step in (0, 1, 2):
        for task in ("red", "blue"):
            trials = [episode for episode in tried if (episode["step"], episode["task"]) == (step, task)]
            assert {episode["instruction"] for episode in trials} == {f"go to the {task} spot"}
            films = [episode for episode in trials if "video" in episode]
            assert films[0] is trials[0]
            assert len(films) == 1 + any(episode["success"] == 0 for episode in trials[1:])
            for episode in films:
                outcome, trial = ["failure", "success"][episode["success"]], episode["unit"][-1]
                assert episode["video"] == f"videos/step_{step:06d}/{task}-trial-00{trial}-{outcome}.mp4"
                assert (run.directory / episode["video"]).read_bytes()[4:8] == b"ftyp"
    page = (run.directory / "report.html").read_text()
    assert page.count("<video") == len(list(run.directory.glob("videos/*/*.mp4"))) == sum(
        "video" in episode for episode in tried)


def test_options_are_part_of_what_the_simulators_are(run):
    run.finish(sets=["run.steps=1", "sim.options.colour=blue", "sim.options.quick=true", "sim.options.size=3"])
    [attached] = run.events("simulator_attached")
    assert attached["kind"] == "python:tests.job.reach:make?colour=blue&quick=true&size=3"


def test_another_body_than_asked_for_is_refused_in_one_line(run):
    process = run.start(sets=["sim.embodiment=" + "5a" * 32])
    run.wait(process, code=2)
    said = [line for line in run.output.read_text().splitlines() if line.startswith("error:")]
    assert len(said) == 1 and "has embodiment none, the run asks for 5a5a5a5a5a5a (sim.embodiment)" in said[0]
    assert run.processes() == []


def test_deaths_cost_no_step_and_no_episode_counts_twice(run):
    process = run.start(sets=["sim.count=2", "sim.envs=2", "run.steps=40", "supervisor.back_off_first_s=0.1"])
    for step, actor in ((4, "simulator-0"), (10, "rollout-0"), (16, "policy-0"), (22, "simulator-1")):
        run.until_step(step)
        os.kill(run.pid(actor), signal.SIGKILL)
    run.until_step(28)
    os.kill(run.pid("rollout-0"), signal.SIGTERM)  # it says goodbye, and its simulators wait for the next one
    run.wait(process)
    run.check_books(40)
    assert Counter(event["actor"] for event in run.events("restarting")) == {
        "simulator-0": 1, "rollout-0": 2, "policy-0": 1, "simulator-1": 1}
    assert run.processes() == []


def test_a_stopped_simulator_is_named_and_its_work_goes_on_at_another(run):
    process = run.start(sets=["sim.count=2", "sim.envs=2", "run.steps=100000", "run.checkpoint_every=100000"])
    run.until_step(4)
    stop(run.pid("simulator-1"))
    eventually(lambda: [event for event in run.events("stuck") if event["actor"] == "simulator-1"],
               "the report of the stopped simulator", within_s=30.0)
    eventually(lambda: any(line in why(run) for line in SILENT), "why naming it", within_s=30.0)
    eventually(lambda: run.events("simulator_gone"), "its work being taken from it", within_s=30.0)
    before = run.step
    run.until_step(before + 4)
    os.kill(run.pid("simulator-1"), signal.SIGCONT)
    eventually(lambda: len([event for event in run.events("simulator_attached")
                            if event["simulator"] == "simulator-1"]) > 1, "simulator-1 being back", within_s=30.0)
    process.send_signal(signal.SIGTERM)
    run.wait(process)
    units = Counter(episode["unit"] for episode in run.episodes())
    assert max(units.values()) == 1


def why(run: SimRun) -> str:
    return subprocess.run([*COMMAND, "why", str(run.directory)], capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def attach(run, popen) -> Iterator[Any]:
    """`cosmos-actor attach` by hand, to the door that `up` printed."""
    started: list[subprocess.Popen[bytes]] = []

    def door() -> list[str] | None:
        lines = run.output.read_text().splitlines() if run.output.exists() else []
        line = next((line for line in lines if "simulators attach to rollout-0" in line), "")
        return line.partition("cosmos-actor attach ")[2].split() or None

    def go(name: str) -> subprocess.Popen[bytes]:
        words = eventually(door, "where simulators attach", within_s=START_S)
        env = {**environment(), "PYTHONPATH": str(ROOT)}
        started.append(popen([sys.executable, "-m", "cosmos_actor.cli", "attach", *words, "--name", name, "--envs",
                              "2"], env=env, stdin=subprocess.DEVNULL))
        return started[-1]

    yield go
    for process in started:
        process.kill()


def test_simulators_come_by_hand_and_leave_with_nothing_lost(run, attach):
    process = run.start(sets=["sim.count=0", "run.steps=30"])
    first = attach("bench-1")
    run.until_step(3)
    second = attach("bench-2")
    run.until_step(10)
    first.send_signal(signal.SIGINT)
    assert first.wait(20.0) == 0
    run.wait(process)
    assert second.wait(20.0) == 0  # the run is over
    run.check_books(30)
    assert {episode["actor"] for episode in run.episodes()} == {"bench-1", "bench-2"}
    assert run.events("simulator_failed") == []


def test_a_stop_does_not_wait_for_simulators_that_are_not_there(run, attach):
    process = run.start(sets=["sim.count=0", "run.steps=100000", "run.checkpoint_every=100000", "sim.silent_s=2"])
    only = attach("bench-1")
    run.until_step(3)
    only.send_signal(signal.SIGINT)
    assert only.wait(20.0) == 0
    eventually(lambda: run.events("simulator_gone"), "the news that it has left", within_s=30.0)
    time.sleep(4.0)  # longer than a stop waits for who is mute
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    run.wait(process)
    assert time.monotonic() - begun < 30.0
    assert "no actor of role simulator answers" in run.events("stopping")[-1]["reason"]


def test_one_that_leaks_says_so_in_one_line_and_is_started_anew(run):
    run.finish(sets=["sim.kind=python:tests.job.reach:make:leak", "sim.max_memory_mb=400", "sim.count=2", "sim.envs=2",
                     "supervisor.intensity=100", "supervisor.back_off_first_s=0.1", "supervisor.back_off_most_s=0.2",
                     "run.steps=20"])
    run.check_books(20)
    left = [event for event in run.events("exited") if event["actor"].startswith("simulator-")]
    gone = [event["text"] for event in run.events("simulator_gone") if "--max-memory-mb" in event["text"]]
    assert gone and all("(sim.max_memory_mb) is 400" in text and "\n" not in text for text in gone)
    assert len([event for event in left if event["exit_code"] == 3]) >= len(gone)
    assert run.events("simulator_failed") == []  # it leaves between two steps: what it had is begun anew elsewhere


@pytest.mark.parametrize(("fault", "kinds", "text"), [
    ("raise", {"step"}, "the arm is out of reach"), ("ask", {"step"}, "EOF"), ("nan", {"not_finite"}, "state"),
    ("shape", {"shape"}, "state"), ("exit", {"lost"}, "is gone"),
    ("hang", {"lost", "hang"}, r"is gone|has not answered")])  # in a step that was announced as slow it hangs
def test_a_fault_is_one_line_with_its_kind_and_never_a_reward(run, fault, kinds, text):
    run.finish(sets=[f"sim.kind=python:tests.job.reach:make:{fault}", "sim.silent_s=2", "sim.count=2", "sim.envs=2",
                     "supervisor.intensity=100", "supervisor.back_off_first_s=0.1", "supervisor.back_off_most_s=0.2",
                     "sim.attempts=5", "run.steps=6", "sim.step_s=4", "sim.reset_s=4"])
    run.check_books(6)
    failures = run.events("simulator_failed")
    assert failures and {failure["kind"] for failure in failures} <= kinds
    for failure in failures:
        assert re.search(text, failure["text"]) and "simulator-" in failure["simulator"] and "\n" not in failure["text"]


def test_what_it_prints_disturbs_nobody(run, undisturbed):
    run.finish(sets=["sim.kind=python:tests.job.reach:make:print"])
    assert run.losses() == undisturbed.losses() and run.events("simulator_failed") == []
    logs = "".join(log.read_text() for log in (run.directory / "logs" / "simulator-0").glob("*.log"))
    assert "a line on stdout" in logs


@pytest.mark.parametrize(("kind", "line"), [
    ("python:tests.job.reach:make:unimportable", "libGL.so.1: cannot open shared object file"),
    ("python:tests.job.nowhere:make", "tests.job.nowhere"), ("gymnesium:CartPole-v1", "gymnasium")])
def test_one_that_can_not_be_loaded_is_refused_before_anything_starts(run, kind, line):
    begun = time.monotonic()
    run.wait(run.start(sets=[f"sim.kind={kind}"]), code=2)
    assert time.monotonic() - begun < START_S
    [said] = run.output.read_text().splitlines()
    assert said.startswith("error: ") and line in said and said.endswith("(setting `sim.kind`)")
    assert not run.directory.exists()
