"""Whether a simulator keeps what `contract` asks of it: a check for each promise, on the simulator as installed here.

    from cosmos_actor.simulator_bridge.conformance import run
    assert not [verdict for verdict in run(make()) if verdict.failed]

A check is a function of a `Bench`: it returns what it saw, or raises `Failed` or `Skipped`. Its name, read aloud, is
the promise. The first ones are basics; where one of them fails, what builds on them is skipped.
"""

from __future__ import annotations

import logging
import time
import traceback
from typing import Callable, List, NamedTuple, Optional

from cosmos_actor.simulator_bridge import checked
from cosmos_actor.simulator_bridge.contract import Simulator
from cosmos_actor.simulator_bridge.mistakes import one_line
from cosmos_actor.simulator_bridge.slots import ENDS

from . import of_episodes, of_process, of_slots
from .bench import Bench, Failed, Skipped

OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
ENVS, STEPS = 2, 50
"""Slots of a session, and steps of an episode, where nothing else is asked for."""

Check = Callable[[Bench], str]
BASICS: List[Check] = of_episodes.BASICS
CHECKS: List[Check] = [*BASICS, *of_episodes.CHECKS, *of_slots.CHECKS, *of_process.CHECKS, *of_process.ALWAYS]
"""In their order."""


class Verdict(NamedTuple):
    """Of one check."""

    check: str
    status: str
    """OK, FAILED or SKIPPED."""
    seen: str
    """One line: what was seen, or why it was skipped."""
    seconds: float
    trace: str = ""
    """Of what the simulator raised."""

    @property
    def failed(self) -> bool:
        return self.status == FAILED


def name_of(check: Check) -> str:
    return check.__name__.replace("_", " ")


def run(simulator: Simulator, *, name: str = "", envs: int = ENVS, steps: int = STEPS,
        begin: Optional[Callable[[str], None]] = None, end: Optional[Callable[[Verdict], None]] = None,
        ) -> List[Verdict]:
    """The verdicts of all checks, in order; raises nothing that the simulator raises.

    `begin` is told each check's name before it, `end` its verdict. `envs` is lowered to what the simulator has. While a
    check runs, descriptors 0 and 1 of the process lead elsewhere.
    """
    bench = Bench(simulator, name, envs, steps)
    verdicts: List[Verdict] = []
    basics = {name_of(check) for check in BASICS}
    for check in CHECKS:
        if begin is not None:
            begin(name_of(check))
        broken = next((verdict.check for verdict in verdicts if verdict.failed and verdict.check in basics), "")
        if broken and check not in of_process.ALWAYS:
            verdict = Verdict(name_of(check), SKIPPED, "`{}` failed".format(broken), 0.0)
        else:
            verdict = judge(check, bench)
        verdicts.append(verdict)
        if end is not None:
            end(verdict)
    return verdicts


def judge(check: Check, bench: Bench) -> Verdict:
    """Of one check, which may have been ended by anything that the simulator raised."""
    begun, traces = time.perf_counter(), _Traces()
    with bench.stdio, traces:
        try:
            status, seen = OK, check(bench)
        except Skipped as reason:
            status, seen = SKIPPED, str(reason)
        except Failed as fault:
            status, seen = FAILED, str(fault)
        except ENDS:
            raise
        except BaseException as error:  # whatever it is, it is a fault of the simulator
            status, seen = FAILED, "raised {}".format(one_line(error))
            traces.text = traces.text or traceback.format_exc()
    return Verdict(name_of(check), status, " ".join(seen.split()), time.perf_counter() - begun,
                   traces.text if status == FAILED else "")


class _Traces(logging.Handler):
    """Takes what `CheckedSession` logs: the first traceback is kept, and nothing is printed among the verdicts."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def __enter__(self) -> None:
        self._propagates, checked.log.propagate = checked.log.propagate, False
        checked.log.addHandler(self)

    def __exit__(self, *raised: object) -> None:
        checked.log.removeHandler(self)
        checked.log.propagate = self._propagates

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None and not self.text:
            self.text = "".join(traceback.format_exception(*record.exc_info))
