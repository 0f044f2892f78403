"""`check` answers fast, imports nothing heavy, and finds what would go wrong."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

HEAVY = ("torch", "transformers", "safetensors", "reasoning_gym", "vllm")
LIMIT_S = 2.0


def test_check_imports_no_torch_and_is_quick(here: Path) -> None:
    code = (
        "import sys\nfrom cosmos_actor.cli import main\ncode = main(['check', 'grpo-arithmetic'])\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\nsys.exit(code)")
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.stderr
    assert "heavy: []" in ended.stderr
    seconds = spent.ru_utime - begun.ru_utime + spent.ru_stime - begun.ru_stime
    assert seconds < LIMIT_S  # of processor: it waits for nothing, and the machine may be busy with something else


def test_check_shows_where_every_actor_goes(cli: Cli) -> None:
    answer = cli("check", "grpo-arithmetic", "--set", "rollout.count=2",
                 "--set", "policy.grpo.kl_coefficient=0.1")
    assert answer.code == 0
    for actor in ("controller-0", "data-0", "reward-0", "replay_buffer-0", "reference-0", "policy-0", "rollout-1"):
        assert actor in answer.out


def test_check_as_json(cli: Cli) -> None:
    found = json.loads(cli("check", "grpo-arithmetic", "--json").out)
    assert found["ok"] and all(finding["ok"] for finding in found["findings"])
    assert [row["actor"] for row in found["placement"]][:2] == ["controller-0", "data-0"]
    assert len({row["process"] for row in found["placement"]}) == len(found["placement"]) == 7
    assert found["settings"]["run"]["name"] == "grpo-arithmetic"


def test_everything_that_is_wrong_is_said_at_once_one_line_each(cli: Cli) -> None:
    answer = cli("check", "grpo-arithmetic", "--json", "--set", "policy.model=/no/such", "--set", "reward.python=/no")
    assert answer.code == 2
    assert len(answer.err.splitlines()) == 2
    findings = json.loads(answer.out)["findings"]
    assert [finding["what"] for finding in findings if not finding["ok"]] == ["model", "interpreter"]


def test_another_interpreter_is_started_and_must_import_the_bus(cli: Cli, here: Path) -> None:
    for name, body in (("good", "echo 3.8.99"), ("bad", "echo 'ModuleNotFoundError: No module named zmq' >&2; exit 1")):
        (here / name).write_text(f"#!/bin/sh\n{body}\n")
        (here / name).chmod(0o755)
    answer = cli("check", "grpo-arithmetic", "--set", f"rollout.python={here}/good")
    assert answer.code == 0 and "Python 3.8.99: rollout" in answer.out
    answer = cli("check", "grpo-arithmetic", "--set", f"rollout.python={here}/bad")
    assert answer.code == 2
    assert "can not import cosmos_actor.bus: ModuleNotFoundError: No module named zmq" in answer.err


@pytest.mark.parametrize(("task", "wrong"), [
    ("mine_to_check.tasks:make", ""), ("mine_to_check.tasks:third", ""),
    ("mine_to_check.tasks:maker", "mine_to_check.tasks has no `maker` (setting `data.task`)"),
    ("broken_to_check.tasks:make", "broken_to_check.tasks can not be loaded: RuntimeError('no licence')"),
])
def test_a_name_is_looked_for_wherever_its_module_takes_it_from_and_that_module_is_not_imported(
        cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch, task: str, wrong: str) -> None:
    for name, source in (("mine_to_check/__init__", ""), ("mine_to_check/deep", "def make(data, seed): ..."),
                         ("mine_to_check/tasks", "from .deep import *\nif 1 / 0:\n    third = 2"),
                         ("broken_to_check/__init__", "raise RuntimeError('no licence')")):
        (here / name).parent.mkdir(exist_ok=True)
        (here / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(here))
    answer = cli("check", "grpo-arithmetic", "--set", f"data.task={task}")
    assert (answer.code, wrong in answer.err) == (2 if wrong else 0, True)


def test_explain_lists_every_setting_with_value_unit_and_reason(cli: Cli) -> None:
    rows = json.loads(cli("check", "grpo-arithmetic", "--explain", "--json").out)
    by_name = {row["setting"]: row for row in rows}
    assert by_name["run.deadline_s"]["unit"] == "s" and "waits" in by_name["run.deadline_s"]["why"]
    assert by_name["data.arithmetic.largest"]["value"] == 9
    assert "run.seed = 0" in cli("check", "grpo-arithmetic", "--explain").out


def test_check_of_a_job_on_simulators_asks_the_simulator(cli: Cli) -> None:
    answer = cli("check", "ppo-cartpole")
    assert answer.code == 0
    assert "simulator: gymnasium:CartPole-v1: 1 task, CartPole-v1" in answer.out
    assert "model:" not in answer.out and "task:" not in answer.out and "simulator-0" in answer.out


@pytest.mark.parametrize(("settings", "line"), [
    (["sim.kind=gymnesium:X"], "did you mean `gymnasium`"), (["sim.kind=gymnasium:CartPole-v99"], "VersionNotFound"),
    (["sim.kind=CartPole-v1"], "expected KIND:ID"), (["sim.kind="], "sim.count = 1 needs sim.kind"),
    (["rollout.count=2"], "sim.count = 1 is under rollout.count = 2"),
    (["policy.ranks=2"], "a control policy is trained by one rank"),
    (["sim.fragment_steps=1", "data.prompts_per_step=1"], "is under control.ppo.mini_batches = 4"),
    (["sim.python=/nowhere/python"], "there is no interpreter /nowhere/python")])
def test_what_a_job_on_simulators_can_not_be_is_one_line(cli: Cli, settings: list[str], line: str) -> None:
    answer = cli("check", "ppo-cartpole", *(word for setting in settings for word in ("--set", setting)))
    assert answer.code == 2 and line in answer.err
