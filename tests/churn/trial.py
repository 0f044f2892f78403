"""A real run with actors that come and go, the same run undisturbed, and what the two of them show."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.churn.member import Member, held_by
from tests.churn.plan import Join, Leave, Plan
from tests.churn.watch import Watch
from tests.job.runs import JOB_S, START_S, Run

SETTINGS = (
    "run.steps=1000000", "run.checkpoint_every=20", "rollout.chunk_prompts=2", "bulk.threshold_bytes=1",
    "limiter.straggler=redispatch", "limiter.straggler_s=2", "supervisor.poison_deaths=20")
"""Every array travels by reference, so that the dying take some along. Deaths from outside are no poison, and what a
frozen actor holds is asked of another one as well: neither changes a number."""
LOOK_S = 0.05
CALM = 0.15
"""Share of the time before anybody joins: for the steps a second, and for what the processes hold then."""
QUIET_S = 12.0
"""After the last of them has gone, before it is looked at what the processes hold: `bus.lost_after_s` and some more."""
ORDINARY = ("departed", "stuck", "goes_on", "exited", "stopping")
MOST_MB, MOST_FDS = 32.0, 8
"""More than so much more memory, or descriptors, in a process of the run when all have gone again is a leak."""
GO_S = 120.0
"""For everybody to leave who is asked to, or has only just been started."""


class Trial:
    """One disturbed run. Its clock is `time.monotonic`."""

    def __init__(self, folder: Path, popen: Callable[..., subprocess.Popen[Any]], *, seed: int) -> None:
        self.run = Run(folder, popen, "churned")
        self.plan = Plan(seed)
        self.watch = Watch(self.run.directory)
        self.members: list[Member] = []
        self._popen, self._folder = popen, folder
        self._up: subprocess.Popen[Any]

    def do(self, seconds: float, *, least: int = 0) -> dict[str, Any]:
        """Churn for so long, and until `least` lives have been of use; then stop the run. All figures but losses."""
        self._up = self.run.start(sets=SETTINGS)
        self.run.until_step(6)
        calm = time.monotonic()
        self._go_on(calm + CALM * seconds)
        before, begun = self._held(), time.monotonic()
        self._churn(begun + seconds, begun + seconds + JOB_S, least)
        ended = time.monotonic()
        self._all_leave()
        after = self._held()
        self._join(Join("reward", "reward-at-the-end"))
        used_before = self._of_use()
        self._go_on(time.monotonic() + START_S, lambda: self._of_use() > used_before)
        for member in self.members:
            member.leaves += ["end of the run"] * member.living
        self._up.send_signal(signal.SIGTERM)
        code = self._wait()
        return {**self._figures(begun, ended, code), "calm_steps_per_s": round(self.watch.rate(calm, begun), 2),
                "held": {name: {"mb": [before[name][0], after[name][0]], "fds": [before[name][1], after[name][1]]}
                         for name in before if name in after}}

    def _go_on(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        while (now := time.monotonic()) < until and self._up.poll() is None and not enough():
            self._look(now)
            time.sleep(LOOK_S)

    def _all_leave(self) -> None:
        """Whoever is there is asked to; what is frozen or to be killed first gets what is coming to it."""
        until = time.monotonic() + GO_S

        def gone() -> bool:
            for member in self.members:
                if member.may_leave:
                    member.leave(Leave(member.name, "interrupt"), time.monotonic())
            return not any(member.living for member in self.members)

        self._go_on(until, gone)
        self._go_on(time.monotonic() + QUIET_S)

    def _churn(self, until: float, at_most: float, least: int) -> None:
        due = time.monotonic()
        while (now := time.monotonic()) < until or (now < at_most and self._of_use() < least):
            self._look(now)
            if self._up.poll() is not None:
                return  # its exit code and its output say why
            if now >= due:
                self._moment(now)
                due = now + self.plan.pause_s()
            time.sleep(LOOK_S)

    def _of_use(self) -> int:
        return sum(member.used is not None for member in self.members)

    def _moment(self, now: float) -> None:
        living = {member.name: member for member in self.members if member.living}
        for deed in self.plan.moment({name: member.role for name, member in living.items()},
                                     {name: member.role for name, member in living.items() if member.may_leave}):
            if isinstance(deed, Join):
                self._join(deed)
            else:
                living[deed.name].leave(deed, now)

    def _join(self, join: Join) -> None:
        log = self._folder / f"{len(self.members):03d}-{join.name}.log"
        self.members.append(Member(self.run, join, self._popen, log, now=time.monotonic()))

    def _look(self, now: float) -> None:
        joined, used = self.watch.look(now)
        newest = {member.name: member for member in self.members}
        for name in joined:
            if name in newest:
                newest[name].joined = now
        for member in newest.values():
            if member.joined is not None and member.used is None and member.name in used and member.joined < now:
                member.used = now
        for member in self.members:
            if member.living:
                member.look(now)

    def _held(self) -> dict[str, tuple[float, int]]:
        """(resident MB, descriptors) of the run's own processes: `up` and all that it has started."""
        up = psutil.Process(self._up.pid)
        names = {up.pid: "up", **{child.pid: name_of(child) for child in up.children(recursive=True)}}
        found = {f"{name} ({pid})": held_by(pid) for pid, name in names.items()}
        return {name: held for name, held in found.items() if held is not None}

    def _wait(self) -> int:
        """For `up` and everybody who joined, at most START_S; the exit code of the former."""
        until = time.monotonic() + START_S
        while self._running() and time.monotonic() < until:
            self._look(time.monotonic())
            time.sleep(LOOK_S)
        code = self._up.poll()
        return -1 if code is None else code

    def _running(self) -> bool:
        return self._up.poll() is None or any(member.living for member in self.members)

    # ---- figures

    def _figures(self, begun: float, ended: float, code: int) -> dict[str, Any]:
        members, watch = self.members, self.watch
        balance = self.run.balance()
        return {
            "exit_code": code, "seconds": round(ended - begun, 1), "started": len(members),
            "joined": sum(member.joined is not None for member in members), "of_use": self._of_use(),
            "names_again": len(members) - len({member.name for member in members}),
            "leaves": dict(Counter(how for member in members for how in member.leaves)),
            "start_to_joined_s": spread([member.joined - member.started for member in members if member.joined]),
            "joined_to_used_s": spread([member.used - member.joined for member in members
                                        if member.used and member.joined]),
            "wrong_exits": [f"{member.name}: {member.code} after {member.leaves} ({member.log.name})"
                            for member in members if member.code is not None and not member.left_as_it_should()],
            "steps": watch.step, "steps_per_s": round(watch.rate(begun, ended), 2),
            "longest_gap_s": round(watch.longest_gap_s(begun, ended), 2),
            "redelivered": dict(watch.redelivered), "events": dict(watch.events), "reasons": reasons(watch.reasons),
            "rewinds": watch.events["rewind"], "ledger": balance, "trained_twice": trained_twice(self.run),
            "orphans": [process.pid for process in self.run.processes()]
            + [member.process.pid for member in members if member.living],
        }


def undisturbed(folder: Path, popen: Callable[..., subprocess.Popen[Any]], *, steps: int, at_most_s: float
                ) -> tuple[Run, float]:
    """The same run with nobody who comes or goes, until it has so many steps or the time is over; steps a second."""
    run = Run(folder, popen, "undisturbed")
    process = run.start(sets=SETTINGS)
    run.until_step(6)
    watch, begun = Watch(run.directory), time.monotonic()
    watch.look(begun)
    while watch.step < steps and time.monotonic() < begun + at_most_s and process.poll() is None:
        time.sleep(LOOK_S)
        watch.look(time.monotonic())
    rate = watch.rate(begun + LOOK_S, time.monotonic())
    process.send_signal(signal.SIGTERM)
    run.wait(process)
    return run, rate


def different_losses(first: Run, second: Run) -> dict[str, int]:
    """{compared, different}: steps that both have done, and those that are not equal to the last bit."""
    one, other = ({line[0]: line for line in run.losses()} for run in (first, second))
    common = sorted(one.keys() & other.keys())
    return {"compared": len(common), "different": sum(one[step] != other[step] for step in common)}


def trained_twice(run: Run) -> int:
    """Trajectories of which more than one attempt stands as trained."""
    with contextlib.closing(sqlite3.connect(run.directory / "ledger.sqlite")) as database:
        [(number,)] = database.execute(
            "SELECT COUNT(*) FROM (SELECT id FROM trajectories WHERE status = 'trained' GROUP BY id"
            " HAVING COUNT(*) > 1)")
    return int(number)


def name_of(process: psutil.Process) -> str:
    """`policy-0` for an actor, the name of the module or file for another process of the run."""
    words = process.cmdline()
    if "--actor" in words:
        return words[words.index("--actor") + 1]
    modules = [words[at + 1].rpartition(".")[2] for at, word in enumerate(words[:-1]) if word == "-m"]
    return (modules or [Path(word).stem for word in words if word.endswith(".py")] or words[:1])[0]


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {"median": round(ordered[len(ordered) // 2], 2), "most": round(ordered[-1], 2)}


def reasons(told: list[tuple[str, str]]) -> list[str]:
    """What happened to the run's own actors and to the job as a whole, and how often."""
    rare = Counter(f"{event}: {reason}" for event, reason in told if event not in ORDINARY)
    return [f"{count} x {text}" if count > 1 else text for text, count in rare.most_common(20)]


def grew(of: list[float]) -> float:
    return of[1] - of[0]


def faults(figures: dict[str, Any]) -> list[str]:
    """What a run must not show, whatever joins and leaves."""
    balance, losses, held = figures["ledger"], figures["losses"], figures["held"]
    found = [] if figures["exit_code"] == 0 else [f"the run ended with exit code {figures['exit_code']}"]
    found += [f"{name} is {figures[name]}, not 0" for name in ("trained_twice", "rewinds") if figures[name]]
    found += [f"processes that are left: {figures['orphans']}"] if figures["orphans"] else []
    found += [f"ended otherwise than they were asked to: {text}" for text in figures["wrong_exits"]]
    if not balance["balanced"] or balance["in_flight"] or balance["buffered"]:
        found.append(f"the ledger: {balance}")
    found += [f"dropped without need: {reason}" for reason in balance["dropped"]]
    found += [f"{name} held {of['mb'][0]} MB and {of['fds'][0]} descriptors, then {of['mb'][1]} and {of['fds'][1]}"
              for name, of in held.items() if grew(of["mb"]) > MOST_MB or grew(of["fds"]) > MOST_FDS]
    if losses["different"] or not losses["compared"]:
        found.append(f"losses of {losses['different']} of {losses['compared']} steps differ from the undisturbed run")
    return found
