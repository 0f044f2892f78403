"""The slow-consumer benchmark, short: a consumer ten times slower costs its producer time, and neither memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.source import ROOT

MESSAGES, ARRAYS = 12_000, 1_600


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["work", "events", "arrays"])
def test_memory_stays_flat_on_both_sides(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/slow_consumer.py", "--messages", str(MESSAGES), "--arrays", str(ARRAYS),
               "--kinds", kind, "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())["results"]
    assert found["handled"] == (ARRAYS if kind == "arrays" else MESSAGES) and not found["out_of_order"]
    assert all(peak > 0 for peaks in found["peaks"].values() for peak in peaks), "both were looked at in each quarter"
