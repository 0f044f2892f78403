"""The small wheel of `sim wheel`: it imports nothing that it lacks, and is all that a simulator's environment needs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_actor import __version__ as VERSION
from cosmos_actor.simulator_bridge.contract import WorkUnit
from cosmos_actor.simulator_bridge.gateway import Gateway
from cosmos_actor.simulator_bridge.wheel import write
from tests.interpreters import require_python
from tests.project.conftest import clean_environment, run
from tests.project.source import PACKAGE, ROOT, imports, modules
from tests.simulator_bridge.driver import assigned, make_keys
from tests.simulator_bridge.driving import attached, driving, step

LONGEST_TEST_S = 600
LEFT_OUT = ("cosmos_actor.cli", "cosmos_actor.cli.app")
"""Who imports what is not in it: the entry point, which has looked for it first."""


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    path, _ = write(tmp_path_factory.mktemp("wheel"))
    return set(zipfile.ZipFile(path).namelist())


def test_it_imports_nothing_that_it_lacks(names: set[str]) -> None:
    inside = {module.name for module in modules() if str(module.path.relative_to(PACKAGE.parent)) in names}
    assert {"cosmos_actor.bus", "cosmos_actor.simulator_bridge.libero", "cosmos_actor.death"} <= inside
    lacking = {
        (module.name, found.target)
        for module in modules() if module.name in inside
        for found in imports(module) if found.target.partition(".")[0] == "cosmos_actor"
        if found.target not in inside
    }  # fmt: skip
    assert lacking == {LEFT_OUT}


def test_it_lacks_no_file_of_its_parts(names: set[str]) -> None:
    wanted = [
        path for part in ("bus", "simulator_bridge") for path in (PACKAGE / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]  # fmt: skip
    assert {str(path.relative_to(PACKAGE.parent)) for path in wanted} - names == set()


# ---- from the installed wheel into an empty environment of CPython 3.8


@pytest.fixture(scope="module")
def small_wheel(make_environment: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As an installed cosmos-actor writes it."""
    folder = tmp_path_factory.mktemp("small")
    command = make_environment(sys.executable, "constraints.txt").parent / "cosmos-actor"
    run([command, "sim", "wheel", "--out", folder], cwd=folder, timeout=60)
    (written,) = folder.iterdir()
    return written


@pytest.fixture(scope="module")
def small(small_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment that has it and what it requires, nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    run([require_python("3.8"), "-m", "venv", folder / "venv"], cwd=folder, timeout=100)
    commands = folder / "venv" / "bin"
    run([commands / "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "constraints-py38.txt",
         small_wheel], cwd=folder, timeout=300)
    return commands


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_an_installed_package_writes_its_own_files_and_requirements(small_wheel: Path, wheel: Path) -> None:
    small, whole = zipfile.ZipFile(small_wheel), zipfile.ZipFile(wheel)
    files = [name for name in small.namelist() if ".dist-info/" not in name]
    assert {name: small.read(name) for name in files} == {name: whole.read(name) for name in files}
    metadata = small.read(f"cosmos_actor-{VERSION}+sim.dist-info/METADATA").decode()
    assert "Provides-Extra: sim\nProvides-Extra: record\n" in metadata and "cli" not in metadata
    for line in ("pyzmq>=25", 'av>=12; extra == "record"'):
        assert f"Requires-Dist: {line}\n" in metadata


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_pip_takes_it_for_cosmos_actor(small: Path, tmp_path: Path) -> None:
    run([small / "pip", "check"], cwd=tmp_path, timeout=60)
    assert f"cosmos-actor {VERSION}+sim" in " ".join(run([small / "pip", "list"], cwd=tmp_path, timeout=60).split())
    for wanted in ("cosmos-actor", f"cosmos-actor[sim]=={VERSION}"):
        run([small / "pip", "install", "--no-index", wanted], cwd=tmp_path, timeout=60)


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_a_new_simulator_passes_its_test_and_steps_for_a_job_of_the_whole_package(
    small: Path, tmp_path: Path, popen: Callable[..., subprocess.Popen[Any]]
) -> None:
    run([small / "cosmos-actor", "sim", "new", "arena"], cwd=tmp_path, timeout=60)
    folder, keys = tmp_path / "arena", make_keys(tmp_path / "keys")
    tested = run([small / "cosmos-actor", "sim", "test", "python:arena:make"], cwd=folder, timeout=100)
    assert ", 0 FAILED, " in tested

    async def play(gateway: Gateway, address: str) -> None:
        popen([small / "cosmos-actor", "attach", "python:arena:make", "--connect", address, "--key", keys["simulator"],
               "--envs", "2"], cwd=folder, env=clean_environment())
        simulator = await attached(gateway)
        task = simulator.description.tasks[0].name
        units = {slot: WorkUnit(f"unit {slot}", task, slot) for slot in simulator.slots}
        assert (await simulator.reset(assigned(units), deadline_s=30.0)).failures == []
        for _ in range(5):
            stepped = await step(simulator, np.zeros((2, 1, *simulator.description.action.shape), np.float32))
            assert stepped.failures == []

    driving(keys, play)


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_what_is_not_in_it_says_what_to_install(small: Path, tmp_path: Path) -> None:
    done = subprocess.run([small / "cosmos-actor", "up", "ppo-cartpole"], cwd=tmp_path, env=clean_environment(),
                          capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "`up` is not in the small wheel" in done.stderr and "pip install 'cosmos-actor[cli]'" in done.stderr
