"""A vision-language-action policy through every role: shown what to do, then PPO with a reference and a critic."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.simulator_bridge.cli import main
from tests.job.runs import Run
from tests.project.source import ROOT

pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RECIPE = """
[run]
loop = "ppo"
experience = "simulator"
steps = 6
checkpoint_every = 4
eval_every = 6
[data]
prompts_per_step = 4
[policy]
sft_steps = 6
sft_batch = 16
[sim]
kind = "python:tests.job.paint:make"
count = 2
envs = 2
fragment_steps = 6
eval_trials = 2
videos = 0
[sim.env]
PYTHONPATH = "{root}"
[control.network]
kind = "vla"
shared = true
[control.flow]
chunk = 4
steps = 2
width = 16
heads = 2
layers = 1
head_layers = 1
[control.cloning]
demonstrations = "{demonstrations}"
mini_batches = 2
[control.ppo]
epochs = 1
mini_batches = 2
critic_first = 1
kl_coefficient = 0.1
[critic]
count = 1
[bus]
lost_after_s = 10.0
"""
SEVEN = ("data", "rollout", "reward", "replay_buffer", "reference", "critic", "policy")


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "demonstrations"
    assert main(["sim", "record", "python:tests.job.paint:make", "--out", str(folder), "--episodes", "8",
                 "--only-success"]) == 0
    return folder


class PaintRun(Run):
    def __init__(self, folder: Path, popen: Any, demonstrations: Path) -> None:
        super().__init__(folder, popen)
        self.recipe.write_text(RECIPE.format(root=ROOT, demonstrations=demonstrations))

    def check_books(self, steps: int = 12) -> None:
        lines = [line for line in self.metrics() if line["phase"] != "eval"]
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
        assert [line["phase"] for line in lines] == ["cloning"] * 6 + ["ppo"] * (steps - 6)
        balance = self.balance()
        assert balance["balanced"] and balance["trained"] == 4 * (steps - 6)
        assert balance["in_flight"] == balance["buffered"] == 0
        counts = Counter((episode["unit"], episode["step"], episode.get("phase")) for episode in self.episodes())
        assert counts and max(counts.values()) == 1

    def episodes(self) -> list[dict[str, Any]]:
        return read_json_lines(self.directory / "episodes.jsonl")


@pytest.fixture
def run(tmp_path, popen, demonstrations) -> PaintRun:
    return PaintRun(tmp_path, popen, demonstrations)


def test_seven_roles_each_a_process_learn_together(run):
    process = run.start()
    run.until_step(2)
    assert {event["actor"].rpartition("-")[0] for event in run.events("started")} >= set(SEVEN)
    run.wait(process)
    run.check_books()
    ppo = [line for line in run.metrics() if line["phase"] == "ppo"]
    for line in ppo:
        assert line["critic/loss/value"] >= 0 and line["kl/reference"] >= -1e-6 and "loss/value" not in line
    assert ppo[0]["kl/reference"] < 1e-5  # the reference is the policy as PPO found it
    assert ppo[0]["grad_norm"] == 0 and ppo[-1]["grad_norm"] > 0  # the critic went first
    evaluations = [line for line in run.metrics() if line["phase"] == "eval"]
    assert [line["step"] for line in evaluations] == [6, 12]
    assert all(line["eval/episodes"] == 4 and line["eval/errors"] == 0 for line in evaluations)
    assert all(1 <= episode["length"] <= 20 for episode in run.episodes())
    assert run.processes() == []


def test_the_same_policy_is_its_own_critic_and_in_one_process_it_is_the_same_to_the_last_bit(run, tmp_path, popen,
                                                                                              demonstrations):
    alone = ["critic.count=0", "control.ppo.kl_coefficient=0", "sim.count=1", "sim.envs=4"]
    run.finish(sets=alone)
    run.check_books()
    (tmp_path / "inproc").mkdir()
    other = PaintRun(tmp_path / "inproc", popen, demonstrations)
    other.finish("--inproc", sets=alone)
    losses = [[(line["step"], line.get("loss/cloning"), line.get("loss/total"), line.get("reward/mean"))
               for line in one.metrics()] for one in (run, other)]
    assert losses[0] == losses[1]


def test_deaths_of_critic_and_reference_cost_no_step(run):
    process = run.start(sets=["run.steps=20", "run.eval_every=0", "supervisor.back_off_first_s=0.1"])
    for step, actor in ((9, "critic-0"), (14, "reference-0"), (19, "critic-0")):
        run.until_step(step)
        os.kill(run.pid(actor), signal.SIGKILL)
    run.wait(process)
    run.check_books(26)
    assert Counter(event["actor"] for event in run.events("restarting")) == {"critic-0": 2, "reference-0": 1}


def test_a_run_that_was_cloned_goes_on_from_its_checkpoint(run):
    run.finish(sets=["run.steps=2"])
    run.finish("--resume", sets=["run.steps=6"])
    run.check_books()


@pytest.mark.parametrize(("setting", "line"), [
    ("control.cloning.demonstrations=/nowhere", "/nowhere: meta/info.json: No such file or directory"),
    ("sim.kind=python:tests.job.reach:make", "discrete"),
    ("control.flow.heads=3", "control.flow.heads = 3 does not divide control.flow.width = 16"),
    ("control.ppo.estimator=vtrace", "critic.count = 1 has them elsewhere"),
    ("control.cloning.demonstrations=", "needs control.cloning.demonstrations"),
])
def test_a_mistake_is_one_line_and_an_exit_code(run, setting, line):
    process = run.start(sets=[setting])
    run.wait(process, code=2)
    said = [words for words in run.output.read_text().splitlines() if "error:" in words]
    assert len(said) == 1 and line in said[0], run.output.read_text()
