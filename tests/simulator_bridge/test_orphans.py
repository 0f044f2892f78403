"""What a simulator's process has started, also what was let go by its own children, ends with it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

PROGRAM = """
import os, subprocess, time
from cosmos_actor.simulator_bridge import orphans
orphans.adopt()
subprocess.Popen(["sleep", "600"])
subprocess.run(["sh", "-c", "sleep 600 & sleep 600 &"])  # its parent has ended: they are nobody's
subprocess.Popen(["true"]).wait()
while len(orphans.descendants(os.getpid())) < 3:
    time.sleep(0.01)
print(*orphans.descendants(os.getpid()), flush=True)
assert orphans.end() == 3
assert orphans.end() == 0 or orphans.descendants(os.getpid()) == []
"""


def state(pid: str) -> str:
    """Empty when there is no such process; Z for one that nobody has waited for yet."""
    try:
        return Path("/proc/{}/stat".format(pid)).read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_all_that_it_has_started_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    pids = done.stdout.split()
    assert len(set(pids)) == 3
    until = time.monotonic() + 10.0
    while any(state(pid) not in ("", "Z", "X") for pid in pids):
        assert time.monotonic() < until, pids
        time.sleep(0.01)
