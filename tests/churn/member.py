"""One joined actor: `cosmos-actor start` as a process, and what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.churn.plan import Join, Leave
from tests.job.runs import COMMAND, Run, environment

SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL,
           "kill at work": signal.SIGKILL, "freeze": signal.SIGSTOP}
AT_WORK_S, GLANCE_S = 2.0, 0.005
"""How long it is waited for a moment at which a process computes, and how often that is looked for."""


class Member:
    """Its process, and the times (of one monotonic clock) at which things happened to it; None: not yet."""

    def __init__(self, run: Run, join: Join, popen: Callable[..., subprocess.Popen[Any]], log: Path, *,
                 now: float) -> None:
        self.join, self.name, self.role, self.log = join, join.name, join.role, log
        self.started, self.dies_at = now, None if join.dies_after_s is None else now + join.dies_after_s
        self.joined: float | None = None
        self.used: float | None = None
        self.leaves: list[str] = []
        self.leave_asked: float | None = None
        self.thaws_at: float | None = None
        self.code: int | None = None
        self.ended: float | None = None
        with log.open("ab") as output:
            self.process = popen(command(run, join), stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                                 env=environment())

    @property
    def living(self) -> bool:
        return self.code is None

    @property
    def may_leave(self) -> bool:
        """It is there, and nothing was done to it or it came through a freeze."""
        return (self.living and self.joined is not None and self.dies_at is None and self.leave_asked is None
                and self.thaws_at is None)

    def leave(self, leave: Leave, now: float) -> None:
        self.leaves.append(leave.how)
        if leave.how == "kill at work":
            until_it_computes(self.process.pid)
        self.process.send_signal(SIGNALS[leave.how])
        if leave.how == "freeze":
            self.thaws_at = now + leave.freeze_s
        else:
            self.leave_asked = now

    def look(self, now: float) -> None:
        """Do to it what is due, and see whether it has ended."""
        self.code = self.process.poll() if self.code is None else self.code
        if self.code is not None:
            self.ended = self.ended or now
            return
        if self.dies_at is not None and now >= self.dies_at:
            self.dies_at = None
            self.leave(Leave(self.name, "kill"), now)
            self.leaves[-1] = "kill while starting" if self.used is None else "kill"
        if self.thaws_at is not None and now >= self.thaws_at:
            self.thaws_at = None
            os.kill(self.process.pid, signal.SIGCONT)

    def left_as_it_should(self) -> bool:
        """The exit code is the one of how it left. Who has lost the run, frozen or at its end, says so with a 1."""
        if "kill" in "".join(self.leaves):
            return self.code == -signal.SIGKILL
        return self.code == 0 or (self.code == 1 and not {"freeze", "end of the run"}.isdisjoint(self.leaves))


def until_it_computes(pid: int) -> None:
    """Until its time on a processor grows; not for ever."""
    until, process = time.monotonic() + AT_WORK_S, psutil.Process(pid)
    before = process.cpu_times().user
    while process.cpu_times().user <= before + 0.01 and time.monotonic() < until:
        time.sleep(GLANCE_S)


def command(run: Run, join: Join) -> list[str]:
    return [*COMMAND, "start", "--role", join.role, "--connect", run.head(), "--name", join.name,
            "--key", str(run.directory / "keys" / f"{join.role}.key")]


def held_by(pid: int) -> tuple[float, int] | None:
    """(resident MB, open descriptors) of a process; None when it is gone."""
    try:
        process = psutil.Process(pid)
        return round(process.memory_info().rss / 1e6, 1), process.num_fds()
    except psutil.Error:
        return None
