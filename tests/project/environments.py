"""The virtual environments of real components, made by `make`: once, however many of pytest's workers ask for one."""

from __future__ import annotations

import fcntl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.project.conftest import clean_environment
from tests.project.source import ROOT

LOOK_S = 0.2


def made(name: str, limit_s: float, **variables: str) -> Path:
    """The Python of `.venv-NAME`. variables: for make. Who comes second waits until the first is through."""
    words = [f"{variable}={value}" for variable, value in variables.items()]
    with alone(name, limit_s):
        done = subprocess.run(["make", "--no-print-directory", *words, f".venv-{name}/.stamp"], cwd=ROOT,
                              env=clean_environment(), timeout=limit_s, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / f".venv-{name}" / "bin" / "python"


@contextmanager
def alone(name: str, limit_s: float) -> Iterator[None]:
    """Nobody else of this checkout is in here with this name. A holder that dies lets go."""
    path = ROOT / "build" / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + limit_s
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < until, f".venv-{name} is being made by somebody else for {limit_s:g} s"
                time.sleep(LOOK_S)
        yield
