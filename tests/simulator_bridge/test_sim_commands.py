"""`cosmos-actor sim`: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.simulator_bridge.cli import main
from cosmos_actor.simulator_bridge.conformance import CHECKS
from cosmos_actor.simulator_bridge.contract import ActionSpec, ArraySpec, Description, TaskSpec
from cosmos_actor.simulator_bridge.embodiment import Camera, EmbodimentMap, Field
from cosmos_actor.simulator_bridge.mistakes import Mistake
from cosmos_actor.simulator_bridge.new import new, package
from cosmos_actor.simulator_bridge.telling import lines, plain

ROOT = Path(__file__).parents[2]
TEMPLATE = "python:cosmos_actor.simulator_bridge.template:make"
FAULTY = "from tests.simulator_bridge.faulty import *\nmake = lambda: of({})\n"
WITHIN_S = 60.0


def sim(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(folder)])
    return subprocess.run([sys.executable, "-m", "cosmos_actor.cli", "sim", *words], cwd=str(folder), timeout=WITHIN_S,
                          env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


# ---- describe

BODY = EmbodimentMap("arm", (Camera("wrist", 8, 4, 180),), (Field("joints", 7),), (Field("move", 6), Field("grip", 1)))
ARM = Description(
    "lab:arm", [TaskSpec("pick", 50, instruction="pick the\ncup"), TaskSpec("place", 0, initial_states=8)],
    {"wrist": ArraySpec("uint8", (4, 8, 3)), "depth": ArraySpec("float32", (4, 8), finite=False)},
    ActionSpec("box", shape=(2,), low=(-1.0, 0.0), high=(1.0, 1.0)), max_envs=4, deterministic=False, control_hz=20.0,
    embodiment=BODY.digest, libraries={"numpy": "1.22.4", "engine": "3"})


def test_it_is_told_what_a_simulator_can_do() -> None:
    assert lines(ARM, BODY) == [
        "simulator      lab:arm",
        "tasks          pick: at most 50 steps, begins by seed; `pick the cup`",
        "               place: no limit of steps, 8 initial states",
        "observations   wrist: uint8 [4, 8, 3]",
        "               depth: float32 [4, 8], may be NaN or infinite",
        "action         box: float32 [2], [-1, 0] to 1",
        "envs           1 to 4 in one process",
        "deterministic  no",
        "expert         none",
        "control rate   20 Hz",
        f"embodiment     arm, digest {BODY.digest[:12]}",
        "               camera wrist: 8 x 4, turned by 180",
        "               state: joints 7",
        "               action: move 6, grip 1",
        "libraries      engine 3",
        "               numpy 1.22.4",
    ]


def test_programs_are_told_everything() -> None:
    told = json.loads(json.dumps(plain(ARM, BODY)))
    assert told["embodiment_digest"] == BODY.digest
    assert EmbodimentMap.from_plain(told["embodiment"]) == BODY
    assert told["tasks"][1] == {"name": "place", "max_steps": 0, "initial_states": 8, "instruction": ""}
    assert plain(ARM, None)["embodiment"] is None


def test_describe_and_its_json(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("print('a banner')\nfrom cosmos_actor.simulator_bridge.template import make\n")
    told = sim("describe", "python:loud:make", "--json", folder=tmp_path)
    assert (told.returncode, told.stderr) == (0, "a banner\n")
    assert json.loads(told.stdout)["simulator"] == "python:loud:make"


@pytest.mark.parametrize(("words", "said"), [
    (["describe", "python:nowhere:make"], "there is no module nowhere in "),
    (["describe", "gymnasum:CartPole-v1"], "did you mean `gymnasium`?"),
    (["describe", TEMPLATE + ":pull"], "can not be made: ValueError: there is only my_simulator:push"),
    (["describe", "python:builtins:str"], "gave str and no Simulator"),
    (["test", "CartPole-v1"], "expected KIND:ID"),
    (["test", TEMPLATE, "--envs", "0"], "--envs 0: expected 1 or more"),
    (["test", TEMPLATE, "--steps", "many"], "invalid int value: 'many' (see cosmos-actor sim test --help)"),
    (["test"], "the following arguments are required: KIND:ID"),
    ([], "the following arguments are required: describe | new | test | record | wheel (see cosmos-actor sim --help)"),
])
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], said: str, capfd: Any) -> None:
    assert main(["sim", *words]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ")
    assert said in err


def test_who_can_not_describe_itself_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text(
        "from cosmos_actor.simulator_bridge.template import Push\n"
        "class Mute(Push):\n    def describe(self):\n        raise OSError('no\\nlicence')\n")
    told = sim("describe", "python:mute:Mute", folder=tmp_path)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr == "error: python:mute:Mute can not describe itself: OSError: no licence\n"


# ---- test


def test_a_line_a_check_and_exit_code_0() -> None:
    told = sim("test", TEMPLATE)
    assert told.returncode == 0, told
    *checks, last = told.stdout.splitlines()
    assert len(checks) == len(CHECKS)
    assert last == f"{TEMPLATE}: {len(CHECKS) - 2} ok, 0 FAILED, 2 skipped"  # no body, no expert
    assert told.stderr == ""


def test_a_fault_is_a_line_with_its_traceback_below_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "fears.py").write_text(FAULTY.format("NoSecondTask"))
    told = sim("test", "python:fears:make", folder=tmp_path)
    assert told.returncode == 1
    assert re.search(r"^every task resets +FAILED +python:fears:make, task push-from-8", told.stdout, re.MULTILINE)
    assert told.stderr.count("Traceback") == 1 and "KeyError: 'push-from-8'" in told.stderr


def test_what_it_prints_is_not_among_the_verdicts(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(FAULTY.format("Prints"))
    told = sim("test", "python:loud:make", "--json", "--steps", "10", "--envs", "1", folder=tmp_path)
    assert told.returncode == 1
    answer = json.loads(told.stdout)
    assert not answer["passed"]
    assert [check["check"] for check in answer["checks"] if check["status"] == "FAILED"] == ["nothing is printed"]


HANGS = """
import sys, time
from cosmos_actor.simulator_bridge import sim_commands, template
template.World.step = lambda world, action: time.sleep(60)
sim_commands.HANG_S = 0.5
sim_commands.run_command(sim_commands.argparse.Namespace(
    command="test", simulator="python:cosmos_actor.simulator_bridge.template:make", envs=1, steps=5, json=False))
"""


def test_one_that_hangs_is_ended_with_its_stacks() -> None:
    told = subprocess.run([sys.executable, "-c", HANGS], cwd=str(ROOT), capture_output=True, text=True, timeout=30)
    assert told.returncode == 1
    assert told.stdout.splitlines()[-1].rstrip() == "steps give what is described"
    assert "Timeout" in told.stderr and "in step" in told.stderr


# ---- new


def test_what_is_written_passes_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    assert main(["sim", "new", "arena", "--dir", str(tmp_path)]) == 0
    assert "cosmos-actor sim test arena:push" in capfd.readouterr().out
    made = tmp_path / "arena"
    assert sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()) == [
        "README.md", "arena.py", "pyproject.toml", "tests/test_arena.py"]
    assert "my_simulator" not in "".join(package("arena").values())
    told = sim("test", "python:arena:make", folder=made)
    assert told.returncode == 0, told.stdout
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(made)])}
    tested = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"], cwd=str(made),
                            env=environment, capture_output=True, text=True, timeout=WITHIN_S)
    assert tested.returncode == 0, tested.stdout


def test_it_is_a_kind_of_simulator_once_it_is_installed() -> None:
    point = '[project.entry-points."cosmos_actor.simulators"]\narena = "arena:make"\n'
    assert point in package("arena")["pyproject.toml"]
    # Installed by `pip install -e` it is found from the folder above, too, where arena/ would be a package without it.
    assert '\npackage-dir = {"" = "."}' in package("arena")["pyproject.toml"]


@pytest.mark.parametrize(("name", "said"), [
    ("my-sim", "NAME my-sim: expected a module's name"),
    ("Arena", "NAME Arena: expected a module's name"),
    ("", "NAME : expected a module's name"),
    ("../up", "expected a module's name"),
    ("lambda", "expected a module's name"),
    ("json", "there is a module of this name here already"),
    ("gymnasium", "there is such a kind of simulator here already"),
    ("taken", "taken is there already: name another, or another folder by --dir"),
])
def test_a_name_that_can_not_be_is_refused(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(Mistake) as refused:
        new(name, tmp_path)
    assert said in str(refused.value)
    assert os.listdir(str(tmp_path)) == ["taken"]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"No such file or directory \(--dir\)"):
        new("arena", tmp_path / "nowhere")
