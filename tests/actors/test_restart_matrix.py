"""OTP's matrix on real processes: each cell is what is done to three children a, b and c, and the whole story after it.

Source of the rules: Erlang/OTP stdlib, `supervisor` (restart types, strategies, intensity and period). A story has
every start, every end with its reason, every decision to start again, and the supervisor's own end; nothing else may
happen.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.actors.restart_policy import Outcome, Restart, RestartLimits, Strategy
from tests.actors.supervised import EVENT_LIMIT_S, Job, python

ALL = ("a-0", "b-0", "c-0")
CELL_LIMIT_S = 100.0

OBEDIENT = """
import os, time
while not os.path.exists({trigger!r}):
    time.sleep(0.01)
os.remove({trigger!r})
"""
FIRST_LIFE_IS_STUBBORN = f"""
import os, signal
if not os.path.exists({{mark!r}}):
    open({{mark!r}}, "w").close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("here", flush=True)
{OBEDIENT}"""
BROKEN = "import sys; sys.stderr.write('error: port taken\\n'); sys.exit(3)"
FAILS_LATER = f"""
import os
if os.path.exists({{mark!r}}):
    {BROKEN.replace("{", "{{")}
open({{mark!r}}, "w").close()
print("here", flush=True)
{OBEDIENT}"""

Step = tuple[str, ...]
KILLED, FINISHED, STOPPED, FAILED = "killed by SIGKILL", "finished", "stopped", "exit 3: error: port taken"


@dataclass(frozen=True)
class Cell:
    """`steps` are done in order, each when the story before it has come; then `story` is all that happened."""

    name: str
    steps: tuple[Step, ...]
    story: tuple[str, ...]
    strategy: Strategy = Strategy.ONE_FOR_ONE
    restart: dict[str, Restart] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    not_ready: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Actor -> the lives in which it never says that it is ready."""
    intensity: int = 5
    standing: bool = True
    """All three are ready before the first step."""


# -- the cells --------------------------------------------------------------------------------------------------------


def ends() -> Iterator[Cell]:
    """b ends in each way, under each restart type and each strategy."""
    does = {Outcome.NORMAL: ("finish", FINISHED), Outcome.SHUTDOWN: ("remove", STOPPED),
            Outcome.ABNORMAL: ("kill", KILLED)}
    for strategy, restart, outcome in product(Strategy, Restart, Outcome):
        step, reason = does[outcome]
        again = outcome is not Outcome.SHUTDOWN and restart.after(outcome)
        group = strategy.group(ALL, "b-0") if again else []
        story = [f"b-0 ended: {reason}"]
        if again:
            story += ["b-0 is restarted", *(f"{actor} ended: {STOPPED}" for actor in reversed(group) if actor != "b-0"),
                      *(f"{actor} started" for actor in group)]
        yield Cell(f"{strategy.value}, {restart.value}, {outcome.value}", ((step, "b-0"),), tuple(story), strategy,
                   {"b-0": restart})


def too_many() -> Iterator[Cell]:
    """More than `intensity` restarts: the supervisor ends everything and says why, whoever owns it decides further."""
    for strategy in Strategy:
        group = strategy.group(ALL, "b-0")
        others = [f"{actor} ended: {STOPPED}" for actor in reversed(group) if actor != "b-0"]
        first = [f"b-0 ended: {KILLED}", "b-0 is restarted", *others, *(f"{actor} started" for actor in group)]
        last = [f"b-0 ended: {KILLED}", "over: gave_up: gave up: 2 restarts within 120 s, more than 1; the last: b-0 "
                + KILLED, f"c-0 ended: {STOPPED}", f"a-0 ended: {STOPPED}"]
        yield Cell(f"{strategy.value}, intensity and escalation", (("kill", "b-0"), ("ready", "c-0"), ("kill", "b-0")),
                   (*first, *last), strategy, intensity=1)
    yield Cell("intensity 0", (("kill", "b-0"),), (
        f"b-0 ended: {KILLED}", f"over: gave_up: gave up: 1 restarts within 120 s, more than 0; the last: b-0 {KILLED}",
        f"c-0 ended: {STOPPED}", f"a-0 ended: {STOPPED}"), intensity=0)


def failing_starts() -> Iterator[Cell]:
    for restart in Restart:
        yield Cell(f"first start fails, {restart.value}", (), (
            "a-0 started", "b-0 started", f"b-0 ended: {FAILED}",
            f"over: failed_to_start: b-0 failed to start: {FAILED}", f"a-0 ended: {STOPPED}"),
            restart={"b-0": restart}, code={"b-0": BROKEN}, not_ready={"b-0": (1,)}, standing=False)
    again = [f"b-0 ended: {FAILED}", "b-0 is restarted", "b-0 started"]
    yield Cell("a restart fails, and again", (("logged", "b-0"), ("kill", "b-0")), (
        f"b-0 ended: {KILLED}", "b-0 is restarted", "b-0 started", *again, f"b-0 ended: {FAILED}",
        f"over: gave_up: gave up: 3 restarts within 120 s, more than 2; the last: b-0 {FAILED}",
        f"c-0 ended: {STOPPED}", f"a-0 ended: {STOPPED}"),
        code={"b-0": FAILS_LATER}, not_ready={"b-0": (2, 3)}, intensity=2)


def deaths_meanwhile() -> Iterator[Cell]:
    yield Cell("one_for_one, a dies while b starts again", (("kill", "b-0"), ("started", "b-0"), ("kill", "a-0")), (
        f"b-0 ended: {KILLED}", "b-0 is restarted", "b-0 started",
        f"a-0 ended: {KILLED}", "a-0 is restarted", "a-0 started"), not_ready={"b-0": (2,)})
    yield Cell("rest_for_one, a dies while b starts again", (("kill", "b-0"), ("started", "b-0"), ("kill", "a-0")), (
        f"b-0 ended: {KILLED}", "b-0 is restarted", f"c-0 ended: {STOPPED}", "b-0 started",
        f"a-0 ended: {KILLED}", "a-0 is restarted", f"b-0 ended: {STOPPED}",
        "a-0 started", "b-0 started", "c-0 started"), Strategy.REST_FOR_ONE, not_ready={"b-0": (2,)})
    yield Cell("one_for_all, a dies while it is stopped for b", (
        ("logged", "a-0"), ("kill", "b-0"), ("ended", "c-0"), ("kill", "a-0")), (
        f"b-0 ended: {KILLED}", "b-0 is restarted", f"c-0 ended: {STOPPED}", f"a-0 ended: {KILLED}",
        "a-0 started", "b-0 started", "c-0 started"), Strategy.ONE_FOR_ALL, code={"a-0": FIRST_LIFE_IS_STUBBORN},
        intensity=1)


def groups() -> Iterator[Cell]:
    yield Cell("one_for_all, a temporary child of the group is forgotten", (("kill", "a-0"),), (
        f"a-0 ended: {KILLED}", "a-0 is restarted", f"c-0 ended: {STOPPED}", f"b-0 ended: {STOPPED}",
        "a-0 started", "c-0 started"), Strategy.ONE_FOR_ALL, {"b-0": Restart.TEMPORARY})
    yield Cell("one_for_all, a transient child that had finished comes back", (("finish", "b-0"), ("kill", "a-0")), (
        f"b-0 ended: {FINISHED}", f"a-0 ended: {KILLED}", "a-0 is restarted", f"c-0 ended: {STOPPED}",
        "a-0 started", "b-0 started", "c-0 started"), Strategy.ONE_FOR_ALL, {"b-0": Restart.TRANSIENT})


CELLS = [*ends(), *too_many(), *failing_starts(), *deaths_meanwhile(), *groups()]
QUICK = ("one_for_one, permanent, abnormal", "one_for_all, transient, abnormal", "rest_for_one, temporary, normal",
         "intensity 0", "first start fails, permanent")


# -- the test ---------------------------------------------------------------------------------------------------------


class Stage:
    """A cell's job, and what happened in it since it stood."""

    def __init__(self, folder: Path, cell: Cell) -> None:
        self.cell, self.folder = cell, folder
        self.lives: Counter[str] = Counter()
        self.begins = 0
        specs = [python(self._code(actor), actor, restart=cell.restart.get(actor, Restart.PERMANENT), shutdown_s=60.0,
                        start_s=60.0)
                 for actor in ALL]
        self.job = Job(folder, *specs, ready=self._is_ready, strategy=cell.strategy,
                       limits=RestartLimits(intensity=cell.intensity, back_off_first_s=0.01))

    def story(self) -> list[str]:
        tell: dict[str, Callable[[dict[str, Any]], str]] = {
            "started": lambda event: f"{event['actor']} started",
            "exited": lambda event: f"{event['actor']} ended: {event['reason']}",
            "restarting": lambda event: f"{event['actor']} is restarted",
            "stopping": lambda event: f"over: {event['kind']}: {event['reason']}"}
        return [tell[event["event"]](event) for event in self.job.events[self.begins:] if event["event"] in tell]

    async def do(self, step: str, actor: str) -> None:
        life = self.job.of("started", actor)[-1]
        if step == "kill":
            os.kill(life["pid"], signal.SIGKILL)
        elif step == "finish":
            self._trigger(actor).touch()
            await self.job.event("exited", actor)
            await self.until(self.settled, "its end was looked at")
        elif step == "remove":
            self.job.supervisor.remove(actor)
        elif step == "logged":
            await self.job.logged(actor, "here")
        elif step == "ready":
            await self.until(self.settled, "everybody is ready again")
        else:
            text = {"started": "started", "ended": "ended"}[step]
            await self.until(lambda: any(line.startswith(f"{actor} {text}") for line in self.story()), text)

    def settled(self) -> bool:
        """Nothing is under way: no child between two states, none that waits, no end that is being looked at."""
        states = {child["state"] for child in self.job.supervisor.children()
                  if self.lives[child["actor"]] not in self.cell.not_ready.get(child["actor"], ())}
        return states <= {"ready", "down"} and not self.job.supervisor._tasks and len(self.story()) > 0

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async with asyncio.timeout(EVENT_LIMIT_S):
            while not condition():
                await asyncio.sleep(0.005)

    def _is_ready(self, actor: str) -> bool:
        self.lives[actor] += 1
        return self.lives[actor] not in self.cell.not_ready.get(actor, ())

    def _trigger(self, actor: str) -> Path:
        return self.folder / f"{actor}.finish"

    def _code(self, actor: str) -> str:
        code = self.cell.code.get(actor, OBEDIENT)
        return code.format(trigger=str(self._trigger(actor)), mark=str(self.folder / f"{actor}.mark"))


async def play(folder: Path, cell: Cell) -> None:
    stage = Stage(folder, cell)
    async with stage.job as job:
        if cell.standing:
            await job.supervisor.until_ready()
            stage.begins = len(job.events)
        for step in cell.steps:
            await stage.do(*step)
        expected = list(cell.story)
        if any(line.startswith("over") for line in expected):
            await asyncio.wait_for(job.supervisor.wait(), EVENT_LIMIT_S)
        else:
            await stage.until(lambda: len(stage.story()) >= len(expected) and stage.settled(), "the end of the story")
        assert stage.story() == expected


@pytest.mark.parametrize("cell", [
    pytest.param(cell, id=cell.name, marks=() if cell.name in QUICK else pytest.mark.slow) for cell in CELLS])
def test_what_follows_an_end(cell: Cell, tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(play(tmp_path, cell), CELL_LIMIT_S))


def test_the_matrix_is_whole() -> None:
    assert len(CELLS) == 27 + 4 + 4 + 3 + 2 and {cell.name for cell in CELLS} >= set(QUICK)
