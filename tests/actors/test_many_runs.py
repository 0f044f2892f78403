"""Runs that start at the same time on one host do not get into each other's way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RUNS = 20
ROOT = Path(__file__).parents[2]


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_twenty_runs_at_the_same_time_take_no_port_of_each_other(
        tmp_path: Path, popen: Callable[..., subprocess.Popen[Any]]) -> None:
    names = [f"run-{number}" for number in range(RUNS)]
    started = [popen([sys.executable, "-m", "tests.actors.programs.small_run", str(tmp_path / name), name], cwd=ROOT,
                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for name in names]
    found = [json.loads(run.stdout.readline()) for run in started]
    assert [run["run"] for run in found] == names
    for run in found:
        assert run["members"] == [["echo-0", run["children"][0]]], "its own actor and no other"
        assert len(run["addresses"]) == 3
    addresses = [address for run in found for address in run["addresses"]]
    assert len(set(addresses)) == 3 * RUNS and all(addresses)
    for run in started:
        run.stdin.close()
    assert [run.wait(60) for run in started] == [0] * RUNS
