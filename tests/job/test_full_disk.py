"""A disk that fills up in the middle of a job: one line, nothing left running, and the run goes on with room again."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.job.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600),
              pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting needs root")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 40 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no mount here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """To the last byte, again and again until nothing can be written any more."""
    filler = disk / "filler"
    for size in (1 << 20, 4096, 1):
        with filler.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


@pytest.mark.parametrize("step", [2, 6])
def test_a_disk_that_fills_up_ends_the_job_with_a_line_and_it_goes_on_when_there_is_room(
        run: Run, disk: Path, step: int, uninterrupted: Run) -> None:
    run.directory = disk / "run"
    process = run.start()
    run.until_step(step)
    filler = fill(disk)
    run.wait(process, code=2)
    said = run.output.read_text()
    assert "can not be written: No space left on device" in said or "database or disk is full" in said
    assert "error: " in said and "Traceback" not in said and run.processes() == []
    filler.unlink()
    run.finish("--resume")
    assert run.losses() == uninterrupted.losses() and run.balance()["balanced"]
