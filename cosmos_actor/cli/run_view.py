"""What a run looks like from outside: metrics and events of its directory folded into one picture. Pure.

Invariant: `steps` grows by step. A line of an earlier step means that the job went back to a checkpoint: what lay
behind is forgotten, so every curve is the one that the final weights really took.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cosmos_actor.actors.role_names import REGISTRY
from cosmos_actor.simulator_bridge.messages import SIMULATOR

Record = Mapping[str, Any]
RECENT_STEPS = 10
"""Steps that a time estimate looks at: enough to even out checkpoints, few enough to follow a change."""
FAILURES = ("failed_to_start", "gave_up")
"""Ends of a job that nobody asked for."""
BESIDE_AN_END = ("exited", "killing", "leftovers", "rewind", "simulator_gone", "departed")
"""What comes between a controller that misses an actor and the word that all are stopped for it: a life is over before
its end is known."""
MEASURED = frozenset({"loss/total", "reward/mean"})
"""A line with one of these is a step's own line; one without is an evaluation."""


@dataclass
class ActorView:
    """One actor over all its lives."""

    actor: str
    role: str
    pid: int | None = None
    started: float | None = None
    interpreter: str = ""
    incarnation: str = ""
    host: str = ""
    state: str = "unknown"
    stuck: str = ""
    restarts: int = 0
    reasons: list[str] = field(default_factory=list)

    @property
    def last_reason(self) -> str:
        return self.reasons[-1] if self.reasons else ""


class RunView:
    """Fold records in with `add_metrics` and `add_events`; read the rest."""

    def __init__(self) -> None:
        self.steps: list[Record] = []
        self.evaluations: list[tuple[int, float]] = []
        self.actors: dict[str, ActorView] = {}
        self.rewinds = 0
        self._stopping = False
        """All actors are being stopped: that the controller misses one of them is neither news nor a cause."""
        self._held: list[str] = []
        """Lines about rewinds that may yet turn out to be that."""

    def add_metrics(self, records: Iterable[Record]) -> None:
        for record in records:
            step = int(record.get("step") or 0)
            if MEASURED & record.keys():
                self._go_back_before(step)
                self.steps.append(record)
            accuracy = number(record, "eval/accuracy")
            if accuracy is not None:
                self.evaluations = [point for point in self.evaluations if point[0] != step] + [(step, accuracy)]

    def _go_back_before(self, step: int) -> None:
        if self.steps and int(self.steps[-1]["step"]) >= step:
            self.steps = [record for record in self.steps if int(record["step"]) < step]
            self.evaluations = [point for point in self.evaluations if point[0] < step]

    def add_events(self, records: Iterable[Record]) -> list[str]:
        """Fold supervisor events in; returns the lines a person should see (an actor died, joined, left).

        That the job went back is said once another event shows that it goes on.
        """
        lines: list[str] = []
        for record in records:
            line = self._add_event(record)
            if self._held and record.get("event") not in BESIDE_AN_END:
                lines += [] if self._stopping else self._held
                self.rewinds -= len(self._held) if self._stopping else 0
                self._held = []
            lines += [line] if line else []
        return lines

    def _add_event(self, record: Record) -> str:
        name, kind = str(record.get("actor") or ""), str(record.get("event") or "")
        if kind in ("stopping", "started"):
            self._stopping = kind == "stopping"
        if kind == "rewind":
            if self._stopping:
                return ""
            self.rewinds += 1
            self._held.append(f"back to the latest checkpoint: {record.get('reason')}")
            return ""
        if kind == "standstill":
            return f"nothing got done for {compact(number(record, 'for_s'), 0)} s: {record.get('why')}; stacks in logs/"
        if kind.startswith(f"{SIMULATOR}_"):
            return self._simulator(kind, record)
        if kind == "weights_alarm":
            what = ("the frozen reference came damaged, it" if record.get("frozen") else
                    f"weights {record.get('step')} came damaged, it goes on with those before and")
            return f"{record.get('rollout')}: {what} fetches them again: {record.get('text')}"
        if kind == "weights_mended":
            what = "tensors of the frozen reference" if record.get("frozen") else f"weights {record.get('step')}"
            return (f"{what} lay damaged in shared memory and were put right: "
                    f"{', '.join(map(str, record.get('tensors') or []))}")
        if kind == "unproven_weights":
            return f"{len(record.get('groups') or [])} groups are not trained on: {record.get('reason')}"
        if kind in ("sink_trouble", "sink_lost"):
            return f"sink {record.get('sink')}: {record.get('text')}"
        if not name:
            return str(record.get("reason")) if kind == "stopping" and record.get("kind") in FAILURES else ""
        actor = self.actors.setdefault(name, ActorView(name, role=name.rpartition("-")[0] or name))
        reason = str(record.get("reason") or "")
        if kind in ("started", "joined"):
            return self._begins(actor, record, joined=kind == "joined")
        if kind == "ready":
            actor.state = "ready"
        elif kind == "restarting":
            actor.restarts += 1
            return f"{name}: {reason}; starting it again" + _in(number(record, "delay_s"))
        elif kind in ("stuck", "goes_on"):
            actor.stuck = reason
            return f"{name} is stuck: {reason}" if reason else f"{name} goes on"
        elif kind in ("exited", "departed"):
            actor.state, actor.stuck = "exited", ""
            actor.reasons.append(reason)
            return f"{name} left: {reason}" if kind == "departed" else ""
        return ""

    def _simulator(self, kind: str, record: Record) -> str:
        """One that nobody of the run has started is known by its attaching; failed attempts are the report's."""
        name, text = str(record.get("simulator") or ""), str(record.get("text") or "")
        if kind == "simulator_refused":
            return f"{name} is refused: {text}"
        if kind not in ("simulator_attached", "simulator_gone"):
            return ""
        actor = self.actors.setdefault(name, ActorView(name, role=SIMULATOR))
        actor.stuck, by_hand = "", not actor.incarnation
        if kind == "simulator_gone":
            if by_hand:
                actor.state = "exited"
                actor.reasons.append(text)
            return f"{name} is gone: {text}"
        if not by_hand:
            return ""
        actor.state, actor.pid, actor.host = "ready", record.get("pid"), str(record.get("host") or "")
        actor.interpreter = f"Python {record.get('python')}"
        return f"{name} attached from {actor.host}"

    def _begins(self, actor: ActorView, record: Record, *, joined: bool) -> str:
        actor.state = "ready" if joined else "starting"
        actor.started = number(record, "time")
        for name in ("pid", "interpreter", "incarnation", "host"):
            if record.get(name) is not None:
                setattr(actor, name, record[name])
        return f"{actor.actor} joined from {actor.host}" if joined else ""

    @property
    def last(self) -> Record:
        """The newest step's record, or an empty one."""
        return self.steps[-1] if self.steps else {}

    @property
    def alive(self) -> int:
        """Actors that take part; the registry only knows of them."""
        return sum(actor.state in ("starting", "ready") and actor.role != REGISTRY for actor in self.actors.values())

    @property
    def restarts(self) -> int:
        return sum(actor.restarts for actor in self.actors.values())

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of every step that has a finite value for `name`."""
        found = ((int(record["step"]), number(record, name)) for record in self.steps)
        return [(step, value) for step, value in found if value is not None]

    def seconds_per_step(self) -> list[tuple[float, float]]:
        """(step, wall seconds of the step)."""
        return self.series("time/step")

    def seconds_left(self, last_step: int) -> float | None:
        """Estimate from the newest steps of the current phase; None before there is one."""
        phase = self.last.get("phase")
        of_phase = {int(record["step"]) for record in self.steps if record.get("phase") == phase}
        recent = [seconds for step, seconds in self.seconds_per_step() if step in of_phase][-RECENT_STEPS:]
        if not recent:
            return None
        return statistics.mean(recent) * max(0, last_step - int(self.last["step"]))


def _in(delay_s: float | None) -> str:
    return f" in {delay_s:.1f} s" if delay_s else ""


def number(record: Record, name: str) -> float | None:
    """A finite number under `name`, or None (JSON null stands for NaN)."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return None
    return float(value)


def duration(seconds: float | None) -> str:
    """`1:02:03` or `2:03`; a dash for unknown."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def compact(value: float | None, digits: int = 3) -> str:
    """A short number for a table; a dash for none."""
    if value is None:
        return "–"
    if value == 0 or 0.001 <= abs(value) < 10_000:
        return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:.1e}" if abs(value) < 1 else f"{value / 1000:.1f}k"
