"""The job's record of its steps: one line of metrics a step, with the time that each side waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cosmos_actor.actors.context import ActorClock
from cosmos_actor.actors.json_lines import JsonLinesWriter, read_json_lines, truncate_after_step


class Journal:
    """Collects the current step's metrics and appends them as one line when the step is over.

    `time` counts the seconds that the job has run, over all its lives: it goes on from the last line after a resume.
    """

    def __init__(self, path: Path, clock: ActorClock) -> None:
        self._path = path
        self._clock = clock
        self._writer = JsonLinesWriter(path)
        self._origin = clock.monotonic()
        self._begun = self._origin
        self._line: dict[str, Any] = {}
        self._seconds: dict[str, float] = defaultdict(float)
        self._highest: dict[str, float] = {}
        self.evaluated: set[int] = set()
        """Steps whose weights were evaluated."""

    def begin(self, step: int) -> None:
        self._begun = self._clock.monotonic()
        self._line = {"step": step}
        self._seconds.clear()
        self._highest.clear()

    def add(self, phase: str, metrics: dict[str, Any]) -> None:
        """More of the current step's line."""
        self._line["phase"] = phase
        self._line.update(metrics)

    def spent(self, what: str, seconds: float) -> None:
        """`what` (generate, update, publish, …) took so long in the current step, summed over actors."""
        self._seconds[what] += seconds

    def highest(self, name: str, value: float) -> None:
        """The line of the current step has under `name` the highest value that is given."""
        self._highest[name] = max(value, self._highest.get(name, value))

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        begun = self._clock.monotonic()
        try:
            yield
        finally:
            self.spent(what, self._clock.monotonic() - begun)

    def finish(self, rollouts: int, more: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Append the line of the current step, with `more` in it."""
        now = self._clock.monotonic()
        wall = now - self._begun
        computing = self._seconds["update"] + float(self._line.get("seconds/publish_stall", 0.0))
        self._line.update({
            "time": round(now - self._origin, 4), "time/step": round(wall, 4),
            "wait/policy": round(max(0.0, wall - computing), 4),
            "wait/rollout": round(max(0.0, wall - self._seconds["generate"] / max(1, rollouts)), 4),
        })
        self._line.update({f"time/{what}": round(seconds, 4) for what, seconds in sorted(self._seconds.items())})
        self._line.update(self._highest)
        self._line.update(more)
        if "tokens" in self._line:
            self._line["tokens/s"] = round(self._line["tokens"] / max(wall, 1e-9), 1)
        self._writer.append(self._line)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of its own: how well the weights of `step` do, greedily, where they were not trained."""
        self._writer.append({
            "step": step, "phase": "eval", "time": round(self._clock.monotonic() - self._origin, 4), **metrics})
        self.evaluated.add(step)

    def roll_back(self, step: int) -> None:
        """Forget the lines after `step`, and count the time on from the last that stays."""
        truncate_after_step(self._path, step)
        lines = read_json_lines(self._path)
        self.evaluated = {line["step"] for line in lines if line.get("phase") == "eval"}
        before = max((line.get("time", 0.0) for line in lines), default=0.0)
        self._origin = self._clock.monotonic() - before

    def close(self) -> None:
        self._writer.close()
