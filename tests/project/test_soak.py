"""The soak benchmark, short: a message whose every wait ends too soon is neither lost nor handled twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.source import ROOT

MESSAGES = 50_000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_waits_that_come_too_soon_lose_and_repeat_nothing(loop: str, tmp_path: Path) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    command = [sys.executable, "benchmarks/soak.py", "--messages", str(MESSAGES), "--loops", loop, "--json",
               str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["done"] == MESSAGES
    assert (found["lost"], found["duplicates_handled"], found["out_of_order"], found["wrong_answers"]) == (0, 0, 0, 0)
    assert found["expired_waits"] > MESSAGES / 4 and found["cancelled_waits"] > MESSAGES / 50, "waits did end too soon"
