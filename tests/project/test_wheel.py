"""What is in the wheel, and that it works outside the checkout with only the core dependencies."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.project.conftest import clean_environment, run
from tests.project.source import PACKAGE

CORE = {"pyzmq", "msgpack", "numpy"}
EXTRAS = {"files", "cli", "train", "vllm", "sim", "record", "all", "dev"}
LONGEST_TEST_S = 600


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path, names: set[str]) -> Message:
    (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(zipfile.ZipFile(wheel).read(name).decode())


def test_every_module_and_every_data_file_is_in(names: set[str]) -> None:
    wanted = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    missing = {str(path.relative_to(PACKAGE.parent)) for path in wanted} - names
    assert missing == set()
    assert {"cosmos_actor/py.typed", "cosmos_actor/recipes/grpo-arithmetic.toml"} <= names


def test_nothing_else_is_in(names: set[str]) -> None:
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"cosmos_actor"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "cosmos-actor"
    assert metadata["Requires-Python"] == ">=3.8"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {line.split(">")[0].strip() for line in required} == CORE
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS


@pytest.fixture(scope="module")
def core_only(make_environment: Callable[..., Path]) -> Path:
    return make_environment(sys.executable, "constraints.txt")


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_it_is_the_installed_one(core_only: Path, tmp_path: Path) -> None:
    where = run([core_only, "-c", "import cosmos_actor; print(cosmos_actor.__file__)"], cwd=tmp_path, timeout=30)
    assert where.startswith(str(core_only.parents[1]))


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_the_command_says_what_to_install(core_only: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [core_only.parent / "cosmos-actor", "--help"],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "pip install 'cosmos-actor[cli]'" in line


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_with_the_cli_extra_alone_check_names_what_is_missing(
    make_environment: Callable[..., Path], wheel: Path, tmp_path: Path
) -> None:
    python = make_environment(sys.executable, "constraints.txt", f"{wheel}[cli]")
    done = subprocess.run(
        [python.parent / "cosmos-actor", "check", "grpo-arithmetic", "--json"],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "pip install 'cosmos-actor[train]'" in line
    assert [finding["what"] for finding in json.loads(done.stdout)["findings"] if not finding["ok"]] == ["libraries"]
