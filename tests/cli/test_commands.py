"""The command line's names, helps and mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_actor.actors.run_directory import RunDirectory
from cosmos_actor.cli.app import app
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.recipes.settings import digest
from tests.cli.conftest import Cli
from tests.cli.sample_run import make_run

COMMANDS = [
    "up", "start", "attach", "sim", "check", "doctor", "status", "why", "weights", "dead-letters", "stop", "logs",
    "version",
]


def test_the_commands_are_these() -> None:
    assert [command.name for command in app.registered_commands] == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_with_an_example(cli: Cli, command: str) -> None:
    answer = cli(command, "--help")
    assert answer.code == 0
    assert f"Example: cosmos-actor {command}" in answer.out


def test_without_a_command_the_help_is_shown(cli: Cli) -> None:
    assert "Example: cosmos-actor up" in cli("--help").out


@pytest.mark.parametrize(("arguments", "words"), [
    (["check", "grpo-arithmetic", "--set", "rollout.temprature=1"], "did you mean `rollout.temperature`?"),
    (["up", "grpo-arithmetic", "--set", "rollout.temprature=1"], "did you mean `rollout.temperature`?"),
    (["up", "grpo-arithmetic", "--set", "run.steps=many"], "setting `run.steps` = \"many\": expected a whole number"),
    (["up", "grpo-arithmetic", "--set", "policy.model=/no"], "directory /no does not exist (setting `policy.model`)"),
    (["up", "grpo-arithmetic", "--set", "policy.model=."], "model directory . has no config.json"),
    (["up", "grpo-arithmetic", "--set", "policy.model=tiny:qwen3?hidden"], "is a number"),
    (["up", "grpo-arithmetic", "--set", "data.task=sums"], "there is no module cosmos_actor.tasks.sums"),
    (["up", "grpo-arithmetic", "--set", "data.task=os.path:nope"], "os.path has no `nope` (setting `data.task`)"),
    (["up", "grpo-arithmetic", "--set", "data.task=cosmos_actor.tasks.arithmetic:mak"], "has no `mak`"),
    (["up", "grpo-arithmetic", "--set", "run.loop=mine:loop"], "there is no module mine"),
    (["up", "grpo-arithmetic", "--set", "run.loop=cosmos_actor.recipes.grpo:main"], "has no `main` (setting `run.l"),
    (["up", "grpo-arithmetic", "--set", "rollout.python=/no/py"], "no interpreter /no/py (setting `rollout.python`)"),
    (["up", "grpo-arithmetic", "--set", "rollout.devices=[9]"], "device"),
    (["up", "grpo-arithmetic", "--set", "bus.host=no.such.host.invalid"], "setting `bus.host`"),
    (["up", "grpo-arithmetc"], "did you mean `grpo-arithmetic`?"),
    (["up"], "name a recipe: grpo-arithmetic"),
    (["check"], "name a recipe, or a run with --live"),
    (["up", "nothing.toml"], "can not read nothing.toml"),
    (["up", "--resume"], "--resume needs a recipe or --run-dir"),
    (["up", "grpo-arithmetic", "--resume"], "there is no run of `grpo-arithmetic` below runs/ to resume"),
    (["up", "grpo-arithmetic", "--listen", "10.0.0.7:5555"], "--listen 10.0.0.7:5555: expected tcp://HOST:PORT"),
    (["start", "--role", "rollout", "--connect", "localhost"], "--connect localhost: expected tcp://HOST:PORT"),
    (["start", "--role", "rollout", "--connect", "tcp://h:99999"], "--connect tcp://h:99999: expected tcp://HOST:PORT"),
    (["start", "--role", "rollout", "--connect", "tcp://h:1", "--key", "no.key"], "there is no key file no.key"),
    (["start", "--role", "policy", "--connect", "tcp://h:1"], "only rollout, reward, reference can join"),
    (["start", "--role", "rollout"], "there is no run `latest`"),
    (["start"], "Missing option '--role'"),
    (["attach", "gymnasium:A", "--connect", "localhost", "--key", "no.key"], "--connect localhost: expected tcp://HOST"),
    (["attach", "gymnasium:A", "--connect", "tcp://h:1", "--key", "no.key"], "there is no key file no.key"),
    (["attach", "CartPole-v1", "--connect", "tcp://h:1", "--key", "no.key"], "expected KIND:ID"),
    (["attach"], "Missing argument 'KIND:ID'"),
    (["sim", "test", "CartPole-v1"], "expected KIND:ID"),
    (["sim", "describe", "gymnasum:A"], "did you mean `gymnasium`?"),
    (["sim", "new", "my-sim"], "NAME my-sim: expected a module's name"),
    (["sim", "frobnicate", "gymnasium:A"], "invalid choice: 'frobnicate'"),
    (["sim"], "Missing argument"),
    (["doctor", "localhost"], "ADDRESS localhost: expected tcp://HOST:PORT"),
    (["doctor", "tcp://h:1", "--key", "no.key"], "there is no key file no.key"),
    (["doctor", "--run", "nothing"], "there is no run `nothing`"),
    (["doctor", "--role", "rollout"], "an address is needed to try a key at: name tcp://HOST:PORT or --run"),
    (["status", "nothing"], "there is no run `nothing`"),
    (["stop", "nothing"], "there is no run `nothing`"),
    (["logs", "nothing", "rollout-0"], "there is no run `nothing`"),
    (["logs", "a", "b", "c"], "logs takes a run and an actor, not 3 words"),
    (["frobnicate"], "No such command 'frobnicate'"),
    (["up", "grpo-arithmetic", "--frobnicate"], "No such option"),
])
def test_a_mistake_is_one_line_and_exit_code_2(cli: Cli, arguments: list[str], words: str) -> None:
    assert words in cli(*arguments).error


@pytest.mark.parametrize(("content", "mode", "words"), [
    ("nonsense", 0o600, "my.key is not a key file (setting `--key`)"),
    ("{}", 0o644, "my.key has mode 0644: others can read it; chmod 600 (setting `--key`)"),
])
def test_a_key_file_that_can_not_be_used_names_the_flag(
        cli: Cli, here: Path, content: str, mode: int, words: str) -> None:
    (here / "my.key").write_text(content)
    (here / "my.key").chmod(mode)
    assert words in cli("start", "--role", "rollout", "--connect", "tcp://127.0.0.1:1", "--key", "my.key").error


def test_a_refused_run_leaves_no_directory_behind(cli: Cli, here: Path) -> None:
    assert cli("up", "grpo-arithmetic", "--set", "policy.model=/no/such").code == 2
    assert not (here / "runs").exists()


def test_a_busy_run_directory_is_refused_with_its_process(cli: Cli, here: Path) -> None:
    with RunDirectory.create(here / "run", digest(resolve("grpo-arithmetic")), run_id="x"):
        error = cli("up", "grpo-arithmetic", "--run-dir", "run").error
        assert f"run is in use by process {os.getpid()}; stop it or name another directory" in error


def test_a_finished_run_directory_is_refused_unless_resumed(cli: Cli, here: Path) -> None:
    make_run(here / "run", metrics=[])
    assert "holds a run already; go on with it by --resume" in cli("up", "grpo-arithmetic", "--run-dir", "run").error


def test_a_resumed_run_can_not_become_another_one(cli: Cli, here: Path) -> None:
    make_run(here / "run", metrics=[])
    error = cli("up", "--resume", "--run-dir", "run", "--set", "rollout.temperature=0.5").error
    assert "rollout.temperature" in error


def test_a_port_that_somebody_listens_at_is_refused(cli: Cli, here: Path) -> None:
    import socket
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = cli("up", "grpo-arithmetic", "--listen", f"tcp://127.0.0.1:{port}").error
    assert f"can not listen at tcp://127.0.0.1:{port}: Address already in use (setting `bus.port`)" in error


def test_an_error_of_the_bus_is_one_line(cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cosmos_actor.bus.errors import PeerRefused
    from cosmos_actor.cli import runs

    def refuse(text: str) -> None:
        raise PeerRefused("the head does not know this key", peer="registry-0")

    monkeypatch.setattr(runs, "find_run", refuse)
    assert cli("status").error == "peer refused: the head does not know this key (peer registry-0)"


@pytest.mark.parametrize("missing", ["typer", "pydantic"])
def test_a_missing_extra_is_one_line(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from cosmos_actor.cli import main; sys.exit(main(['up']))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    assert "pip install 'cosmos-actor[cli]'" in ended.stderr


def test_an_interrupt_before_the_command_runs_is_no_traceback() -> None:
    code = ("import sys\nclass Interrupted:\n    def find_spec(self, name, *more):\n        if name == 'typer':\n"
            "            raise KeyboardInterrupt\nsys.meta_path.insert(0, Interrupted())\n"
            "from cosmos_actor.cli import main\nsys.exit(main(['up']))")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_version_as_json(cli: Cli) -> None:
    import json

    from cosmos_actor import __version__
    assert json.loads(cli("version", "--json").out)["cosmos-actor"] == __version__
