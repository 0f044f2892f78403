"""The wheel, built once, and environments outside the checkout that it is installed into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.project.source import ROOT

WHAT_A_WHEEL_IS_MADE_OF = ("pyproject.toml", "README.md", "LICENSE")


def run(command: list[str | Path], *, cwd: Path, timeout: float) -> str:
    """stdout of a command that must succeed; its stderr is in the failure otherwise."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, timeout=timeout, capture_output=True, text=True, env=clean_environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def clean_environment() -> dict[str, str]:
    """This environment without what would let the checkout be imported by accident."""
    unwanted = ("PYTHON", "VIRTUAL_ENV", "PYTEST")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the source so that nothing stale in build/ can get in."""
    tree = tmp_path_factory.mktemp("source")
    for name in WHAT_A_WHEEL_IS_MADE_OF:
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "cosmos_actor", tree / "cosmos_actor", ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, tree], cwd=tree, timeout=100)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def make_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_environment(python, constraints, *more): an environment's python, with the wheel; made once."""

    @cache
    def make(python: str, constraints: str, *more: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        run([python, "-m", "venv", folder / "venv"], cwd=folder, timeout=100)
        made = folder / "venv" / "bin" / "python"
        install = [made, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / constraints]
        run([*install, wheel, *more], cwd=folder, timeout=400)
        return made

    return make
