"""What a run writes, read while it is written: when steps came, who was used, what happened to whom."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from cosmos_actor.actors.json_lines import follow_json_lines


class Tail:
    """New lines of a file of JSON lines; one that was cut back is read on from where it ends then."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def lines(self) -> list[dict[str, Any]]:
        if self._path.exists():
            self._offset = min(self._offset, self._path.stat().st_size)
        lines, self._offset = follow_json_lines(self._path, self._offset, skip_damaged=True)
        return lines


class Watch:
    """Times are when a line was seen, on the caller's clock."""

    def __init__(self, directory: Path) -> None:
        self._metrics, self._events = Tail(directory / "metrics.jsonl"), Tail(directory / "events.jsonl")
        self.steps: list[tuple[float, int]] = []
        """(seen at, step) of every line of a step, in the order in which they came."""
        self.events: Counter[str] = Counter()
        self.reasons: list[tuple[str, str]] = []
        """(event, reason) of what should be rare."""
        self.redelivered: Counter[str] = Counter()

    def look(self, now: float) -> tuple[list[str], set[str]]:
        """(who has joined, who was of use) since the look before."""
        events = self._events.lines()
        self.events.update(event["event"] for event in events)
        self.reasons += [(event["event"], f"{event.get('actor', '')} {event.get('reason', '')}".strip())
                         for event in events if event["event"] not in ("started", "ready", "joined", "ended")]
        used: set[str] = set()
        for line in self._metrics.lines():
            if "loss/total" in line:
                self.steps.append((now, line["step"]))
            used |= {name.rpartition("/")[2] for name, count in line.items() if name.startswith("answers/") and count}
            for name, count in line.items():
                if name.startswith("redelivered/"):
                    self.redelivered[name.partition("/")[2]] = count
        return [event["actor"] for event in events if event["event"] == "joined"], used

    @property
    def step(self) -> int:
        return self.steps[-1][1] if self.steps else 0

    def rate(self, since: float, until: float) -> float:
        """Steps finished a second; a step that was done twice counts once."""
        seen = [(at, step) for at, step in self.steps if since <= at <= until]
        return len({step for _, step in seen}) / max(until - since, 1e-9)

    def longest_gap_s(self, since: float, until: float) -> float:
        """Between two lines of steps, or an end of the time and the line next to it."""
        times = [since, *(at for at, _ in self.steps if since <= at <= until), until]
        return max(after - before for before, after in zip(times, times[1:], strict=False))
