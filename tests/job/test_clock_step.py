"""The wall clock of a whole job is stepped an hour forwards, then an hour back: nobody notices."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from cosmos_actor.actors.json_lines import read_json_lines
from tests.job.runs import Run

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600),
              pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler is needed for the stepped clock")]
HOUR_S = 3600
PATIENT = [f"{name}=900" for name in ("bus.lost_after_s", "supervisor.heartbeat_s", "supervisor.stuck_s",
                                      "supervisor.no_progress_s")]
"""Less than an hour by far, and more than any busy machine needs: what fires is the step's fault."""
HARMLESS = {"started", "ready", "weights_taken", "exited", "stopping", "ended"}


class WallClock:
    """What time.time() says in every process that is started from now on, against the real one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file, library = folder / "step", folder / "step_clock.so"
        self.step(0)
        source = Path(__file__).with_name("step_clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
        monkeypatch.setenv("CLOCK_STEP_FILE", str(self._file))
        monkeypatch.setenv("LD_PRELOAD", str(library))

    def step(self, seconds: int) -> None:
        """In place: the processes have the file mapped."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", seconds))


def test_no_deadline_no_lease_and_no_liveness_depends_on_it(
        run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Run) -> None:
    clock = WallClock(tmp_path, monkeypatch)
    process = run.start(sets=PATIENT)
    run.until_step(5)
    clock.step(HOUR_S)
    run.until_step(7)
    clock.step(-HOUR_S)
    run.wait(process)
    events = read_json_lines(run.directory / "events.jsonl")
    assert events[-1]["event"] == "ended" and events[-1]["time"] < events[0]["time"] - HOUR_S / 2, "it was stepped"
    assert {event["event"] for event in events} <= HARMLESS, "nobody was lost, stuck, restarted or at a standstill"
    assert run.losses() == uninterrupted.losses() and run.balance() == uninterrupted.balance()
