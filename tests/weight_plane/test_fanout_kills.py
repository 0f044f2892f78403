"""A few of the points of `python -m tests.weight_plane.fan_out`, and eight rollouts behind shaped lines, made small."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.netns import skip_reason
from tests.weight_plane.fan_out.kills import PUBLISHER, RELAY, SUBSCRIBER, WORLD, Point, end_all, figures
from tests.weight_plane.fan_out.world import World

ROOT = Path(__file__).resolve().parents[2]
POINTS = [
    Point(PUBLISHER, "policy-0", 5, signal.SIGKILL), Point(SUBSCRIBER, "rollout-1", 3, signal.SIGKILL),
    Point(RELAY, "rollout-2", 1, signal.SIGKILL), Point(RELAY, "rollout-3", 1, signal.SIGSTOP),
    Point(SUBSCRIBER, "rollout-0", 7, signal.SIGSTOP), Point(PUBLISHER, "policy-0", 0, signal.SIGKILL),
]


@pytest.mark.heavy
def test_whoever_ends_between_two_chunks_the_old_version_stays_and_the_next_one_arrives(tmp_path: Path, popen: Any):
    found = figures(end_all(World(popen, tmp_path, **WORLD), POINTS, len(POINTS)))
    assert found["broken"] == [] and found["points"] == len(POINTS)
    assert found["by_kind"]["publisher killed"]["kept"] == 8
    assert sum(row["reached"] for row in found["by_kind"].values()) >= 4


@pytest.mark.heavy
@pytest.mark.netns
@pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))
def test_the_trainer_sends_about_one_copy_over_real_lines(tmp_path: Path):
    """Times are the benchmark's; here only what was sent counts, which a busy machine does not change."""
    command = [sys.executable, "benchmarks/fanout.py", "--rollouts", "4", "--mib", "8", "--bucket-kib", "1024",
               "--rounds", "1", "--rate", "100mbit", "--json", tmp_path / "found.json"]
    subprocess.run(command, cwd=ROOT, timeout=90, check=False)
    one, four = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert one["rollouts"] == 1 and four["rollouts"] == 4
    assert 1.0 <= one["copies"] <= 1.3 and 1.0 <= four["copies"] <= 1.3
    assert four["desk"]["problems"] == {}
