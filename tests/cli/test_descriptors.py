"""Where a process may have 64 descriptors: a line that names the limit, before anything is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.bus import make_run_keys

LIMIT = "only 64 file descriptors allowed, 512 wanted: raise `ulimit -n` (setting `bus.min_descriptors`)\n"
NOBODY = "tcp://127.0.0.1:1"
ANSWER_S = 60.0
"""A cold start of Python on a busy machine. Nothing is waited for."""


def with_64(popen: Callable[..., subprocess.Popen[Any]], *command: str) -> tuple[int, str, str]:
    """What a command of the package says and returns where both limits are 64."""
    limited = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", sys.executable, "-m", *command]
    process = popen(limited, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    out, err = process.communicate(timeout=ANSWER_S)
    return process.returncode, out, err


@pytest.fixture
def key(tmp_path: Path) -> str:
    return str(make_run_keys(tmp_path / "keys", "run", ["rollout", "supervisor"])["rollout"])


def test_up_starts_nothing(popen: Callable[..., Any], tmp_path: Path) -> None:
    directory = tmp_path / "run"
    code, out, err = with_64(popen, "cosmos_actor.cli", "up", "grpo-arithmetic", "--run-dir", str(directory))
    assert (code, out, err) == (2, "", f"error: {LIMIT}") and not directory.exists()


def test_check_says_so_too(popen: Callable[..., Any]) -> None:
    code, _, err = with_64(popen, "cosmos_actor.cli", "check", "grpo-arithmetic")
    assert (code, err) == (2, f"error: {LIMIT}")


def test_start_joins_nobody(popen: Callable[..., Any], key: str) -> None:
    code, out, err = with_64(popen, "cosmos_actor.cli", "start", "--role", "rollout", "--connect", NOBODY, "--key", key)
    assert (code, out, err) == (2, "", f"error: {LIMIT}")


def test_an_actor_ends_with_the_line_that_no_restart_would_mend(popen: Callable[..., Any], key: str) -> None:
    code, out, err = with_64(popen, "cosmos_actor.job.actor", "--role", "rollout", "--actor", "rollout-0",
                             "--connect", NOBODY, "--key", key)
    assert (code, out, err) == (2, "", f"error: {LIMIT}")
