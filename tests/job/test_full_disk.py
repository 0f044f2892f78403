"""A disk that fills up under a job: one line, nothing left running, and the run goes on with room again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.job.runs import START_S, Run
from tests.waiting import eventually

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


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system whose journal can be given up, as the kernel does when a disk answers with errors."""
    image, folder = tmp_path / "image", tmp_path / "failing"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    if shutil.which("mkfs.ext4") is None or subprocess.run(["mkfs.ext4", "-q", "-F", str(image)]).returncode:
        pytest.skip("no mkfs.ext4 here")
    if not mounts(image, folder):
        pytest.skip("no loop device here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def mounts(image: Path, folder: Path) -> bool:
    return subprocess.run(["mount", "-o", "loop", str(image), str(folder)], capture_output=True).returncode == 0


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


def test_a_resume_that_finds_no_room_loses_nothing(run: Run, disk: Path, uninterrupted: Run) -> None:
    """Full before it begins, then full while its actors start."""
    run.directory = disk / "run"
    process = run.start()
    run.until_step(7)
    process.send_signal(signal.SIGTERM)
    run.wait(process)
    stopped_at, filler = run.step, fill(disk)
    assert refused(run, run.start("--resume")).count("No space left on device") == 1
    filler.unlink()
    before = len(run.events("started"))
    process = run.start("--resume")
    eventually(lambda: len(run.events("started")) > before, "the first actor of the resumed run", within_s=START_S)
    filler = fill(disk)
    said = refused(run, process)
    assert "No space left on device" in said or "database or disk is full" in said
    filler.unlink()
    assert run.step >= stopped_at
    run.finish("--resume")
    assert run.losses() == uninterrupted.losses() and run.balance()["balanced"]


def refused(run: Run, process: subprocess.Popen[bytes]) -> str:
    """What `up` says that ends with a mistake which a person can put right, and with none of its processes left."""
    before = run.output.read_text()
    run.wait(process, code=2)
    said = run.output.read_text()[len(before):]
    assert "error: " in said and "Traceback" not in said and run.processes() == [], said
    return said


def test_a_disk_that_stops_writing_ends_the_job_with_a_line_and_the_checkpoint_is_on_it(
        run: Run, failing_disk: Path, uninterrupted: Run) -> None:
    """What was only in the kernel's memory is lost with the file system's journal."""
    run.directory = failing_disk / "run"
    process = run.start()
    run.until_step(7)
    subprocess.run(["mount", "-o", "remount,abort", str(failing_disk)], check=True)
    assert "Read-only file system" in refused(run, process)
    assert "Read-only file system" in refused(run, run.start("--resume"))
    subprocess.run(["umount", str(failing_disk)], check=True)
    assert mounts(failing_disk.with_name("image"), failing_disk)
    run.finish("--resume")
    assert run.losses() == uninterrupted.losses() and run.balance()["balanced"]
