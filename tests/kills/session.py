"""One disturbed run and an undisturbed one, and what both tell: what the script and the test share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.job.runs import Run
from tests.kills.figures import figures
from tests.kills.killer import Killer, exit_code_of, settings, still_listening
from tests.leaks import Snapshot


def kill_all_over(run: Run, undisturbed: Run, kills: int, seed: int,
                  told: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """The figures; `broken` says what of them is wrong. Raises killer.EndedEarly for a run that does not last."""
    before = Snapshot.take()
    killer = Killer(run, kills, seed, told)
    begun = time.monotonic()
    exit_code = killer.go()
    wall_s = time.monotonic() - begun
    left = [*before.leaks(), *(f"process {process.pid}" for process in run.processes()),
            *(f"port {port}" for port in sorted(still_listening(killer.ports)))]
    alone = undisturbed.start("--inproc", sets=settings(kills))
    assert exit_code_of(alone, kills, "the undisturbed run") == 0, undisturbed.output.read_text()
    return {"seed": seed, **figures(run, killer.deaths), "exit_code": exit_code, "wall_s": round(wall_s, 1),
            "left": left, "ports_seen": len(killer.ports), "same_losses": run.losses() == undisturbed.losses()}
