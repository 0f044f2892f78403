"""`cosmos-actor sim wheel`: a small file, a valid wheel, the same bytes each time, and what it does unpacked."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64decode
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any, Callable

import pytest

import cosmos_actor
from cosmos_actor.simulator_bridge.cli import main
from cosmos_actor.simulator_bridge.wheel import built, write

TEMPLATE = "python:cosmos_actor.simulator_bridge.template:make"
WITHIN_S = 60.0
LARGEST_BYTES = 300_000
INFO = "cosmos_actor-{}+sim.dist-info/".format(cosmos_actor.__version__)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("wheel"))[0]


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`cosmos-actor WORDS` with what is in `folder` and no checkout."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-m", "cosmos_actor.cli", *words], cwd=str(folder), env=environment,
                          timeout=WITHIN_S, capture_output=True, text=True)


def headers(content: bytes) -> Message:
    return Parser().parsestr(content.decode())


# ---- the file


def test_it_is_small(wheel: Path, record_property: Callable[[str, Any], None]) -> None:
    size = wheel.stat().st_size
    record_property("bytes", size)
    print("{}: {:,} bytes".format(wheel.name, size))
    assert size < LARGEST_BYTES


def test_its_name_is_a_wheels(wheel: Path) -> None:
    assert wheel.name == "cosmos_actor-{}+sim-py3-none-any.whl".format(cosmos_actor.__version__)
    assert wheel.parent.joinpath(wheel.name).read_bytes() == built().content
    assert os.listdir(str(wheel.parent)) == [wheel.name]


def test_its_record_has_every_file_with_its_hash_and_its_size(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    *lines, last = archive.read(INFO + "RECORD").decode().splitlines()
    assert last == INFO + "RECORD,,"
    recorded = {}
    for line in lines:
        name, digest, size = line.split(",")
        kind, _, text = digest.partition("=")
        assert kind == "sha256"
        recorded[name] = (urlsafe_b64decode(text + "="), int(size))
    names = archive.namelist()
    assert sorted(names) == sorted({*recorded, INFO + "RECORD"})
    contents = {name: archive.read(name) for name in recorded}
    assert recorded == {name: (hashlib.sha256(content).digest(), len(content)) for name, content in contents.items()}
    assert archive.testzip() is None


def test_the_same_files_give_the_same_bytes(unpacked: Path, wheel: Path, tmp_path: Path) -> None:
    """Whatever their times and modes, and also from the small wheel itself."""
    for path in unpacked.rglob("*.py"):
        os.utime(str(path), (1e9, 1e9))
        path.chmod(0o600)
    done = command(unpacked, "sim", "wheel", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_its_metadata_are_those_of_what_is_installed_here(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    here, there = metadata.metadata("cosmos-actor"), headers(archive.read(INFO + "METADATA"))
    assert there["Version"] == cosmos_actor.__version__ + "+sim"
    for key in ("Metadata-Version", "Name", "Summary", "License", "Requires-Python"):
        assert there[key] == here[key]
    assert there["Requires-Python"] == ">=3.8"
    assert there.get_all("Provides-Extra") == [
        extra for extra in here.get_all("Provides-Extra") or [] if extra in ("sim", "record")]
    required = here.get_all("Requires-Dist") or []
    assert there.get_all("Requires-Dist") == [
        line for line in required if "extra" not in line or "record" in line.partition("extra")[2]]
    assert {line.partition(">")[0] for line in required if "extra" not in line} == {"pyzmq", "msgpack", "numpy"}
    assert b"cosmos-actor = cosmos_actor.cli:main" in archive.read(INFO + "entry_points.txt")
    assert b"Apache License" in archive.read(INFO + "licenses/LICENSE")


# ---- the command


def test_it_says_what_to_do_with_it(tmp_path: Path, capfd: Any) -> None:
    assert main(["sim", "wheel", "--out", str(tmp_path)]) == 0
    (name,) = os.listdir(str(tmp_path))
    out, err = capfd.readouterr()
    assert out.startswith("{}: ".format(tmp_path / name)) and err == ""
    assert "\n  pip install ./{}\n  cosmos-actor attach ".format(name) in out


def test_the_folder_is_made(tmp_path: Path, capfd: Any) -> None:
    """As `sim record` makes its own."""
    assert main(["sim", "wheel", "--out", str(tmp_path / "new" / "dist")]) == 0
    assert os.listdir(str(tmp_path / "new" / "dist")) == [built().name]


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc", "/proc/below", "taken"])
def test_a_folder_that_can_not_be_written_is_one_line(folder: str, tmp_path: Path, capfd: Any) -> None:
    """/proc: root may write anywhere else."""
    (tmp_path / "file").touch()
    (tmp_path / "taken" / built().name).mkdir(parents=True)
    assert main(["sim", "wheel", "--out", str(tmp_path / folder)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: can not write into {}: ".format(tmp_path / folder)) and err.endswith(" (--out)\n")
    assert os.listdir(str(tmp_path / "taken")) == [built().name]


def test_what_is_not_installed_has_no_wheel(tmp_path: Path) -> None:
    (tmp_path / "cosmos_actor").symlink_to(Path(cosmos_actor.__file__).parent)
    done = subprocess.run([sys.executable, "-S", "-m", "cosmos_actor.cli", "sim", "wheel"], cwd=str(tmp_path),
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
                          timeout=WITHIN_S)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "and not installed" in done.stderr and "pip install it" in done.stderr


def test_modules_of_another_version_than_the_installed_one_have_no_wheel(unpacked: Path, tmp_path: Path) -> None:
    """As after a `git pull` beside an editable install: its requirements may be old ones."""
    (tmp_path / "cosmos_actor").symlink_to(unpacked / "cosmos_actor")
    old = tmp_path / "cosmos_actor-0.0.9.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: cosmos-actor\nVersion: 0.0.9\n")
    done = command(tmp_path, "sim", "wheel")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cosmos-actor 0.0.9 is installed, but its modules in " in done.stderr


# ---- what it does


def test_unpacked_it_tests_simulators(unpacked: Path) -> None:
    done = command(unpacked, "sim", "test", TEMPLATE, "--steps", "10", "--envs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 FAILED, " in done.stdout


@pytest.mark.parametrize(("words", "what"), [(["up", "grpo-arithmetic"], "`up`"), (["--help"], "`--help`"),
                                             ([], "the rest")])
def test_what_is_not_in_it_says_what_to_install(unpacked: Path, words: list[str], what: str) -> None:
    done = command(unpacked, *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: {} is not in the small wheel of cosmos-actor".format(what))
    assert "pip install 'cosmos-actor[cli]'" in done.stderr
