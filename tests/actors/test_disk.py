"""What the file system refuses is one line about the file; what an actor prints can not be refused at all."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_actor.actors.disk import refusal, writing
from cosmos_actor.actors.errors import RunDirectoryUnusable
from cosmos_actor.actors.run_directory import write_whole


def test_a_file_that_can_not_be_written_is_named_whatever_it_was_called_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryUnusable, match=r"part\.npz can not be written: No space left.*run\.run_dir"):
        with writing(tmp_path / "part.npz"):
            raise OSError(errno.ENOSPC, "No space left on device", ".writing-part.npz")


def test_a_fault_of_the_program_is_not_a_refusal(tmp_path: Path) -> None:
    assert refusal(ValueError("x")) is None and refusal(OSError(errno.EBADF, "Bad file descriptor")) is None
    with pytest.raises(OSError, match="Bad file descriptor"), writing(tmp_path):
        raise OSError(errno.EBADF, "Bad file descriptor")


def test_a_refusal_is_found_behind_the_errors_of_libraries() -> None:
    try:
        try:
            raise OSError(errno.EROFS, "Read-only file system", "/x/model")
        except OSError as error:
            raise RuntimeError("the writer failed") from error
    except RuntimeError as error:
        assert "/x/model can not be written: Read-only file system" in str(refusal(error))


def test_a_whole_file_that_can_not_be_written_is_named_and_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError, match="there'"):
        write_whole(tmp_path / "there", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("printing", [
    "print('x' * 100_000)", "print('x', file=sys.stderr, flush=True)", "sys.stdout.flush(); sys.stderr.flush()",
    "import logging; logging.warning('x')", "import traceback; traceback.print_stack()", "print(chr(0xd800))"])
def test_an_actor_prints_into_a_full_disk_as_if_nothing_had_happened(printing: str) -> None:
    code = f"import os, sys\nfrom cosmos_actor.actors import log_stream\nlog_stream.install()\n{printing}\nsys.exit(7)"
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, timeout=60).returncode == 7
