"""`check` answers fast, imports nothing heavy, and finds what would go wrong."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Answer, Cli
from tests.netns import skip_reason
from tests.project.source import ROOT

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


def test_vllm_is_looked_for_where_the_rollout_will_run(cli: Cli, here: Path) -> None:
    answer = cli("check", "grpo-arithmetic", "--set", "rollout.engine=vllm")
    [said] = answer.err.splitlines()
    assert answer.code == 2 and f"needs vLLM in {sys.executable}: there is no module vllm" in said
    assert said.endswith("(setting `rollout.python`)")
    (here / "vllm.py").touch()
    (here / "python").write_text(f"#!/bin/sh\nPYTHONPATH={here}:{ROOT} exec {sys.executable} \"$@\"\n")
    (here / "python").chmod(0o755)
    answer = cli("check", "grpo-arithmetic", "--set", "rollout.engine=vllm", "--set", f"rollout.python={here}/python")
    assert answer.code == 0 and f"engine: vllm, of {here}/python" in answer.out
    answer = cli("check", "grpo-arithmetic", "--set", "rollout.engine=vllm", "--set", f"rollout.python={here}/python",
                 "--set", "rollout.tensor_parallel=3")
    assert answer.code == 2 and "rollout.tensor_parallel = 3 can not share the 4 attention heads" in answer.err
    answer = cli("up", "grpo-arithmetic", "--inproc", "--set", "rollout.engine=vllm")
    assert answer.code == 2 and "wants a process of its own" in answer.err


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


def test_the_port_of_simulators_is_looked_at_for_each_rollout(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for first, count in ((port, 1), (port - 1, 2)):
            answer = cli("check", "ppo-cartpole", "--set", "sim.count=0", "--set", f"rollout.count={count}",
                         "--set", f"sim.port={first}")
            assert answer.code == 2
            assert f"tcp://127.0.0.1:{port}: Address already in use (setting `sim.port`)" in answer.err
    answer = cli("check", "ppo-cartpole", "--set", "sim.count=0", "--set", f"sim.port={port}")
    assert answer.code == 0 and f"simulators' address: tcp://127.0.0.1:{port}\n" in answer.out


def test_a_plug_in_is_looked_for_where_it_will_be_loaded(cli: Cli, here: Path) -> None:
    folder = here / "only_for_rollouts"
    folder.mkdir()
    (folder / "their_plug_ins.py").write_text("def make(*arguments, **more): ...\nLIMIT = 3\n")
    asked = ("check", "ppo-cartpole", "--set", "sim.count=0")
    there = ("--set", f"rollout.env.PYTHONPATH={folder}:{ROOT}")
    answer = cli(*asked, *there, "--set", "sim.driver=their_plug_ins:make", "--set", "sim.source=their_plug_ins:make")
    assert answer.code == 0, answer.err
    assert "plug-in: their_plug_ins:make (sim.driver)" in answer.out
    assert "plug-in: their_plug_ins:make (sim.source)" in answer.out
    for more, line in (
            (("--set", "sim.driver=their_plug_ins:make"), "there is no module their_plug_ins"),
            ((*there, "--set", "sim.driver=their_plug_ins:LIMIT"), "LIMIT of their_plug_ins can not be called"),
            ((*there, "--set", 'sim.sinks=["their_plug_ins:make"]'), "there is no module their_plug_ins")):
        answer = cli(*asked, *more)
        [said] = answer.err.splitlines()
        name = "sim.sinks" if "sinks" in more[-1] else "sim.driver"
        assert answer.code == 2 and line in said and said.endswith(f"(setting `{name}`)")


def test_what_rollouts_of_other_hosts_load_is_theirs_to_find(cli: Cli) -> None:
    answer = cli("check", "ppo-cartpole", "--set", "sim.count=0", "--set", "rollout.count=0",
                 "--set", "sim.driver=only_there:make")
    assert answer.code == 0 and "plug-in" not in answer.out


def on_nodes(cli: Cli, through: str, *sets: str) -> Answer:
    settings = (f"sim.through={through}", *sets)
    return cli("check", "ppo-cartpole", *(word for setting in settings for word in ("--set", setting)))


def test_check_asks_the_simulator_through_the_launcher_that_will_start_it(cli: Cli) -> None:
    """A clean environment and another folder, as on another host; a shell there greets first."""
    greeting = '["sh", "-c", "echo welcome to {node}; cd /; exec env -i \\"$@\\"", "sh"]'
    answer = on_nodes(cli, greeting, "sim.count=3", 'sim.nodes=["node7", "node8"]')
    assert answer.code == 0, answer.err
    assert "simulator: gymnasium:CartPole-v1: 1 task, CartPole-v1; Python " in answer.out
    assert "welcome to node7" in answer.out and "welcome to node8" in answer.out  # named, each once
    assert ": data, rollout, reward, replay_buffer, reference, critic, policy\n" in answer.out  # sim is nobody's here


@pytest.mark.parametrize(("through", "sets", "line"), [
    ('["no-such-launcher"]', [], "there is no program no-such-launcher (setting `sim.through`)"),
    ('["nice"]', ["sim.python=/nowhere/python"],
     "can not be loaded by /nowhere/python through `nice`: nice: ‘/nowhere/python’: No such file or directory"),
    ('["nice"]', ["sim.python=/no where/python"], "which no shell changes (setting `sim.python`)"),
    ('["nice"]', ["sim.kind=gymnesium:X"], "did you mean `gymnasium`? (setting `sim.kind`)"),
    ('["sh", "-c", "echo connect to host node7: refused >&2; exit 255"]', [],
     "through `sh -c 'echo connect to host node7: refused >&2; exit 255'`: connect to host node7: refused (setting "
     "`sim.through`)"),
    ('["sh", "-c", "echo the menu"]', [], "only said: the menu (setting `sim.through`)"),
    ('["sh", "-c", "exec \\"$@\\" </dev/null", "sh"]', [], "docker exec and kubectl exec need -i) did not come"),
    ('["nice"]', ["sim.nodes=[\"node7\"]"], "sim.nodes and {node} in sim.through need each other")])
def test_what_is_wrong_on_a_node_is_one_line(cli: Cli, through: str, sets: list[str], line: str) -> None:
    assert line in on_nodes(cli, through, *sets).error


@pytest.mark.netns
@pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))
def test_a_node_that_can_not_reach_the_door_is_told_of_the_address(cli: Cli) -> None:
    error = on_nodes(cli, '["unshare", "--net"]').error
    assert "through `unshare --net` can not reach tcp://127.0.0.1:" in error
    assert error.endswith("Network is unreachable; name an address that it can reach (setting `bus.host`)")


def test_a_transport_of_weights_that_can_not_serve_is_refused_by_name(cli: Cli, here: Path) -> None:
    (here / "file").write_text("")
    for sets, line in (
        (("weights.transport=directory",), "needs weights.directory"),
        (("weights.transport=nccl",), "needs run.placement = \"disaggregated\""),
        (("weights.transport=nccl", "run.placement=disaggregated"), "policy.device = \"cpu\""),
        (("weights.transport=cuda_ipc",), "weights.transport = \"cuda_ipc\" needs a GPU at both ends"),
        (("weights.transport=cuda_ipc", "run.placement=disaggregated"), "it needs run.placement = \"colocated\""),
        (("weights.transport=cuda_ipc", "run.grouping=single"), "it needs run.grouping = \"per_role\""),
        (("weights.transport=cuda_ipc", "weights.delta=always"), "always brings a version in full"),
        (("weights.transport=cuda_ipc", "policy.ranks=2", "rollout.count=2"), "that of the policy's first rank"),
        (("weights.transport=pigeon",), "weights.transport"),
        (("weights.transport=directory", "weights.directory=versions", "weights.delta=always"),
         "always brings a version in full: weights.delta"),
        (("weights.keep=1", "weights.delta=always"), "weights.keep = 1 frees it first: 2 or more"),
        (("weights.directory=nosuch://there",), "nobody here can open it"),
        (("weights.directory=file/below",), "can not be written"),
    ):
        answer = cli("check", "grpo-arithmetic", *(word for one in sets for word in ("--set", one)))
        assert answer.code == 2 and line in answer.err, (sets, answer.err)
    assert cli("check", "grpo-arithmetic", "--set", "weights.directory=file://" + str(here / "versions")).code == 0
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.parametrize(("setting", "place"), [
    ("weights.directory", "/proc/versions"), ("weights.directory", "file:///proc/a/b"), ("run.run_dir", "/proc/run")])
def test_a_place_where_nothing_can_be_made_is_refused_whatever_its_permissions_say(
        cli: Cli, setting: str, place: str) -> None:
    error = cli("check", "grpo-arithmetic", "--set", f"{setting}={place}").error
    assert error.startswith("/proc can not be written") and error.endswith(f"(setting `{setting}`)")


@pytest.mark.parametrize("model", ["tiny:qwen3", "directory"])
def test_adapters_for_layers_that_the_model_has_not_are_refused_before_anything_starts(
        cli: Cli, here: Path, model: str) -> None:
    (here / "phi").mkdir()
    (here / "phi" / "config.json").write_text('{"model_type": "phi3"}')
    header = b"{}"
    (here / "phi" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (here / "phi" / "tokenizer.json").write_text("{}")
    sets = [f"policy.model={here / 'phi' if model == 'directory' else model}", "policy.lora.rank=4"]
    flags = [part for one in (*sets, 'policy.lora.targets=["q_proj", "query"]') for part in ("--set", one)]
    answer = cli("check", "grpo-arithmetic", *flags)
    found = "'q_proj', the model has down_proj, gate_up" if model == "directory" else "'query', the model has down_proj"
    assert answer.code == 2 and f"error: policy.lora.targets has {found}" in answer.err
    assert cli("up", "grpo-arithmetic", "--run-dir", "run", *flags).code == 2 and not (here / "run").exists()
