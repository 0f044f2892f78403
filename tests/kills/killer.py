"""One run whose actors are killed by SIGKILL, one after the other, and what there is to see of it from outside."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from cosmos_actor.actors.messages import READY
from cosmos_actor.actors.role_names import REGISTRY
from tests.job.runs import START_S, Run, kill
from tests.kills.plan import Kill, Pace, plan, steps_of
from tests.waiting import eventually

LOOK_S = 0.1
PATIENCE_S = 600.0
"""The longest that the run may take to give the next kill its chance: cold starts, of a minute each on busy cores."""
STEP_S = 5.0
"""What a step may take, on average, when nobody is killed: on quiet cores it takes a tenth of a second."""
TAIL_BYTES = 16 * 1024


class EndedEarly(Exception):
    """The run was over before the last kill: it gave up, or it was too short."""


@dataclass(frozen=True)
class Death:
    """One life that was ended."""

    actor: str
    incarnation: str
    time: float
    step: int
    """The furthest step then."""
    served: bool
    """It had told that it is ready for work; the news is up to a second old."""


def settings(kills: int) -> list[str]:
    """What both runs have, the disturbed one and the one it is compared with."""
    return [f"run.steps={steps_of(kills)}", "rollout.count=2", "reward.count=2"]


def tolerance(kills: int) -> list[str]:
    """So many deaths are nobody's fault, restarts are soon, and only who is killed dies, however busy the machine."""
    return ["run.checkpoint_every=2", f"supervisor.intensity={10 * kills}", f"supervisor.poison_deaths={10 * kills}",
            "supervisor.back_off_first_s=0.1", "supervisor.back_off_most_s=0.5", "supervisor.start_s=600",
            "supervisor.heartbeat_s=600", "bus.lost_after_s=120"]


class Killer:
    """Starts a run and kills its actors as planned; the run's own end is the caller's."""

    def __init__(self, run: Run, kills: int, seed: int, told: Callable[[str], None] = lambda line: None) -> None:
        self.deaths: list[Death] = []
        self.ports: set[int] = set()
        """Where processes of the run were seen to listen."""
        self._run, self._kills, self._seed, self._told = run, kills, seed, told
        self._pace = Pace()
        self._process: subprocess.Popen[Any]

    def go(self) -> int:
        """All kills, then the end of the run; its exit code. Raises EndedEarly, or fails naming what did not come."""
        self._process = self._run.start(sets=[*settings(self._kills), *tolerance(self._kills)])
        actors = eventually(self._standing, "every actor at its place", within_s=PATIENCE_S)
        for number, planned in enumerate(plan(actors, self._kills, self._seed), 1):
            self._wait_for(planned, by_step=steps_of(number))
            death = self._strike(planned.actor)
            self.deaths.append(death)
            self._told(f"{number:4} step {death.step:5} {death.actor}{'' if death.served else ', which was starting'}")
        return exit_code_of(self._process, self._kills, "the disturbed run")

    # ---- when

    def _wait_for(self, planned: Kill, by_step: int) -> None:
        """Until it is time, or the run has come so far that it is."""
        due = time.monotonic() + planned.after_s
        until = due + PATIENCE_S
        while time.monotonic() < due and self._pace.furthest < by_step:
            self._look(planned.actor)
        while objection := self._pace.objection(planned.actor):
            assert time.monotonic() < until, f"{PATIENCE_S:g} s were not enough for {objection}"
            self._look(planned.actor)

    def _look(self, actor: str) -> None:
        if self._process.poll() is not None:
            last = self._run.output.read_text()[-2000:]
            raise EndedEarly(f"exit code {self._process.returncode} after {len(self.deaths)} kills: {last}")
        self._pace.reached(_last_step(self._run))
        if self._serves(actor):
            self._pace.serves(actor)
        time.sleep(LOOK_S)

    # ---- whom

    def _strike(self, actor: str) -> Death:
        """Kill the living process of `actor`; one that is between two lives is waited for."""
        life = eventually(lambda: self._living(actor), f"a living process of {actor}", within_s=PATIENCE_S)
        self.ports |= listening(self._run)
        death = Death(actor, life["incarnation"], time.time(), self._pace.furthest, self._serves(actor))
        kill(life["pid"])
        self._pace.killed(actor)
        return death

    def _living(self, actor: str) -> dict[str, Any] | None:
        """The `started` event of the life of `actor` that has not ended."""
        ended = {event["incarnation"] for event in self._run.events("exited")}
        lives = [event for event in self._run.events("started") if event["actor"] == actor]
        ours = {process.pid for process in self._run.processes()}  # never a stranger that has taken its number
        return next((life for life in lives[-1:] if life["pid"] in ours and life["incarnation"] not in ended), None)

    # ---- what status.json says

    def _standing(self) -> list[str]:
        """All actors, once each was there: who dies in the first start of a job is one that can not start."""
        started, ready = ({event["actor"] for event in self._run.events(name)} for name in ("started", "ready"))
        expected = {child["actor"] for child in self._status().get("children", ())}
        return sorted(started) if expected and expected <= started == ready else []

    def _serves(self, actor: str) -> bool:
        """Its newest life is ready for work. The registry, which writes status.json, is when it was heard."""
        newest = [event["incarnation"] for event in self._run.events("started") if event["actor"] == actor][-1]
        if actor.startswith(REGISTRY):
            return any(event["incarnation"] == newest for event in self._run.events("ready"))
        members = self._status().get("members", ())
        return any(member["incarnation"] == newest and member.get("state") == READY for member in members)

    def _status(self) -> dict[str, Any]:
        path = self._run.directory / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}


def exit_code_of(process: subprocess.Popen[Any], kills: int, what: str) -> int:
    """Once it has ended; a run has so long for its steps."""
    eventually(lambda: process.poll() is not None, f"the end of {what}", within_s=START_S + steps_of(kills) * STEP_S)
    return int(process.returncode)


def listening(run: Run) -> set[int]:
    """The ports at which processes of `run` listen."""
    pids = {process.pid for process in run.processes()}
    return {port for pid, port in _listeners() if pid in pids}


def still_listening(ports: set[int]) -> set[int]:
    """Those of `ports` that are open though the run is over. One that another process has taken since is not."""
    return {port for pid, port in _listeners() if port in ports and pid is None}


def _listeners() -> list[tuple[int | None, int]]:
    return [(connection.pid, connection.laddr.port) for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN]


def _last_step(run: Run) -> int:
    """Of the metrics, from the end of the file: it is looked at all the time."""
    path = run.directory / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")[1:-1]  # the first may be torn, the last may be written just now
    return json.loads(lines[-1])["step"] if lines else 0
