"""The simulator's side, bus and bridge, from the installed wheel: on CPython 3.8 with numpy 1.22 and on others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.bus.keys import make_run_keys
from tests.interpreters import require_python
from tests.project.conftest import clean_environment, run
from tests.project.source import ROOT, modules
from tests.waiting import eventually

PROGRAM = Path(__file__).parent / "programs" / "round_trip.py"
LONGEST_TEST_S = 900
RUNS_ON_38 = ("", "bus", "simulator_bridge", "death", "python_versions")
SUITES_ON_38 = ("tests/bus", "tests/bulk", "tests/simulator_bridge")
NEWER = ("actors", "job", "recipes", "roles", "tasks", "trainer", "weight_plane")


@contextmanager
def serving(python: Path, folder: Path) -> Iterator[list[str]]:
    """A simulator in its own process; yields the arguments by which the other side finds it."""
    make_run_keys(folder / "keys", "round-trip", ["simulator", "rollout"])
    address = folder / "address"
    server = subprocess.Popen(
        [python, PROGRAM, "serve", folder / "keys", address],
        cwd=folder, env=clean_environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        eventually(lambda: address.exists() or server.poll() is not None, "an address of the server", within_s=30)
        assert address.exists(), server.communicate(timeout=10)[1]
        yield [str(folder / "keys"), str(address)]
        _, errors = server.communicate(timeout=20)
        assert server.returncode == 0, errors
    finally:
        server.kill()
        server.wait()


def round_trip(server: Path, client: Path, folder: Path) -> dict[str, Any]:
    with serving(server, folder) as arguments:
        return dict(json.loads(run([client, PROGRAM, "ask", *arguments], cwd=folder, timeout=60)))


def check(answer: dict[str, Any]) -> None:
    assert answer["small"] == [1, [36, 117]]
    assert answer["large"] == [2, [7 * 256 * 3]]


@pytest.fixture(scope="module")
def here(make_environment: Callable[..., Path]) -> Path:
    return make_environment(sys.executable, "constraints.txt")


@pytest.fixture(scope="module")
def python38(make_environment: Callable[..., Path]) -> Path:
    return make_environment(require_python("3.8"), "constraints-py38.txt")


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_two_processes_of_the_installed_wheel(here: Path, tmp_path: Path) -> None:
    answer = round_trip(here, here, tmp_path)
    check(answer)
    assert Path(answer["package"]).is_relative_to(here.parents[1])
    assert not {"torch", "pydantic", "typer", "ray", "pickle5"} & set(answer["modules"])


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
@pytest.mark.parametrize("server, client", [("3.8", "3.8"), ("3.8", "new"), ("new", "3.8")])
def test_python38_and_numpy_1_22(server: str, client: str, here: Path, python38: Path, tmp_path: Path) -> None:
    pythons = {"3.8": python38, "new": here}
    answer = round_trip(pythons[server], pythons[client], tmp_path)
    check(answer)
    assert (answer["answered_by"] == "3.8", answer["asked_by"] == "3.8") == (server == "3.8", client == "3.8")


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_every_module_of_the_simulators_side_loads_on_python38(python38: Path, tmp_path: Path) -> None:
    names = [module.name for module in modules() if module.part in RUNS_ON_38]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    run([python38, "-W", "error", "-c", code, *names], cwd=tmp_path, timeout=60)


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
@pytest.mark.parametrize("part", NEWER)
def test_what_needs_a_newer_python_says_so_in_one_line(part: str, python38: Path, tmp_path: Path) -> None:
    code = f"try:\n    import cosmos_actor.{part}\nexcept ImportError as error:\n    print(error)"
    line = run([python38, "-c", code], cwd=tmp_path, timeout=60)
    assert len(line.splitlines()) == 1
    assert "needs Python 3.10 or newer, this is 3.8" in line


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_the_command_says_so_too(python38: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [python38.parent / "cosmos-actor", "up", "grpo-arithmetic"],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "needs Python 3.10 or newer" in line


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_the_suites_of_the_simulators_side_pass_on_python38(python38: Path, tmp_path: Path) -> None:
    pip_install = [python38, "-m", "pip", "install", "-q", "-c", ROOT / "constraints-py38.txt"]
    run([*pip_install, "pytest", "pytest-timeout", "hypothesis", "pyarrow", "av", "pillow"], cwd=tmp_path, timeout=300)
    for name in SUITES_ON_38:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests/__init__.py", "tests/netns.py", "tests/waiting.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copy(Path(__file__).parent / "programs" / "conftest_py38.py", tmp_path / "tests" / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 120\nmarkers =\n slow\n heavy\n gpu\n netns\n")
    selected = "not slow and not heavy and not gpu and not netns"
    done = run([python38, "-m", "pytest", "-q", "-m", selected, *SUITES_ON_38], cwd=tmp_path, timeout=600)
    assert " passed" in done and " failed" not in done
