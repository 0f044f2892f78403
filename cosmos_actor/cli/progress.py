"""Live progress of a run, read from the files it writes. Knows nothing of processes."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cosmos_actor.actors.json_lines import DamagedLine, follow_json_lines
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.cli.run_view import Record, RunView, compact, duration, number

POLL_S = 0.25
"""Interval between two looks at the files: quick to the eye, idle to the processor."""
JOIN_S = 3.0
"""The end of a run does not wait longer for its own progress display."""


class Follower:
    """Keeps a RunView up to date with a run directory that is being written."""

    def __init__(self, run_directory: Path) -> None:
        self._paths = RunPaths(run_directory)
        self._metrics_offset = self._events_offset = 0
        self.view = RunView()

    def follow(self) -> tuple[list[Record], list[str]]:
        """Read what is new: (steps, lines about actors)."""
        steps, self._metrics_offset = self._metrics()
        events, self._events_offset = follow_json_lines(self._paths.events, self._events_offset, skip_damaged=True)
        self.view.add_metrics(steps)
        return list(steps), self.view.add_events(events)

    def _metrics(self) -> tuple[list[Record], int]:
        """A file that was cut back and grew again between two looks has the offset inside a line: it is read anew."""
        try:
            return follow_json_lines(self._paths.metrics, self._metrics_offset)
        except DamagedLine:
            self.view.steps = []
            return follow_json_lines(self._paths.metrics, 0, skip_damaged=True)


class Progress:
    """Shows a run until the `with` block ends: a live panel on a terminal, else one flushed line a step."""

    def __init__(self, run_directory: Path, *, title: str, last_step: int, live: bool | None = None,
                 stream: TextIO | None = None) -> None:
        stream = sys.stdout if stream is None else stream
        self._console = Console(file=stream, highlight=False)
        self._live_wanted = self._console.is_terminal if live is None else live
        self._follower = Follower(run_directory)
        self._title, self._last_step = title, last_step
        self._printed: set[tuple[object, ...]] = set()
        self._over = threading.Event()
        self._live: Live | None = None
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    @property
    def view(self) -> RunView:
        return self._follower.view

    def notice(self, text: str) -> None:
        self._print(Text(text, style="yellow" if self._live_wanted else ""))

    def __enter__(self) -> Progress:
        self._take_as_seen()
        if self._live_wanted:
            self._live = Live(self._panel(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(JOIN_S)
        self._look()
        if self._live is not None:
            self._live.stop()

    def _take_as_seen(self) -> None:
        """What a resumed run has written before is known, and not news."""
        self._printed.update(map(_key, self._follower.follow()[0]))

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        steps, lines = self._follower.follow()
        for line in lines:
            self._print(Text(line, style="red" if self._live_wanted else ""))
        if self._live is not None:
            self._live.update(self._panel())
        else:
            self._print_new(steps)

    def _print_new(self, records: list[Record]) -> None:
        """A file that was cut back is read from its start again: what was printed before is not printed twice."""
        for record in records:
            if _key(record) not in self._printed:
                self._printed.add(_key(record))
                self._print(Text(plain_line(record, self.view, self._last_step)))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)
        self._console.file.flush()

    def _panel(self) -> RenderableType:
        return panel(self.view, self._title, self._last_step)


def _key(record: Record) -> tuple[object, ...]:
    """Equal only for one and the same line: a step that is done again ends at another time."""
    return record.get("step"), record.get("phase"), record.get("time")


def evaluated(record: Record) -> str:
    """What an evaluation found: the share of right answers, or how a simulator's trials ended."""
    accuracy, episodes = number(record, "eval/accuracy"), number(record, "eval/episodes")
    if episodes is None:
        return f"accuracy {compact(accuracy, 3)} on held-out problems"
    facts = [f"{label} {compact(number(record, name), digits)}"
             for label, name, digits in (("return", "eval/return", 1), ("success", "eval/accuracy", 3))
             if number(record, name) is not None]
    errors = number(record, "eval/errors")
    return " · ".join([*facts, f"trials {episodes:.0f}", *([f"errors {errors:.0f}"] if errors else [])])


def plain_line(record: Record, view: RunView, last_step: int) -> str:
    """One step in one line, for logs and pipes."""
    if record.get("phase") == "eval":
        return f"step {record.get('step')}/{last_step} evaluation: {evaluated(record)}"
    facts = [
        f"step {record.get('step')}/{last_step} {record.get('phase', '')}",
        *(f"{label} {compact(number(record, name), digits)}" for label, name, digits in FIGURES
          if number(record, name) is not None),
        f"weights {record['version']}" if record.get("version") is not None else "",
        f"GPU {peaks(record)}" if peaks(record) else "",
        f"actors {view.alive}" if view.actors else "",
        f"restarts {view.restarts}" if view.restarts else "",
        f"left {duration(view.seconds_left(last_step))}",
    ]
    return " · ".join(fact for fact in facts if fact)


def peaks(record: Record) -> str:
    """The most memory of a GPU that each side had in its turn; empty where nobody takes turns on one."""
    found = ((side, number(record, f"memory/{side}_peak_bytes")) for side in ("policy", "rollout"))
    return ", ".join(f"{side} {value / 1e9:.1f} GB" for side, value in found if value is not None)


FIGURES = (
    ("return", "episode/return", 1), ("success", "episode/success", 3), ("reward", "reward/mean", 3),
    ("loss", "loss/total", 3), ("KL", "kl/reference", 4), ("entropy", "entropy", 3),
    ("tokens/s", "tokens/s", 0), ("staleness", "staleness/max", 0),
)
"""(word, metric, decimals) of what a step says about itself."""


def panel(view: RunView, title: str, last_step: int) -> RenderableType:
    """The live panel: a bar with the time left, the newest step's numbers, the actors."""
    last = view.last
    step = int(last.get("step") or 0)
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True, justify="right")
    bar.add_row(Text(f"{title}  {last.get('phase', 'starting')}", style="bold"),
                ProgressBar(total=max(1, last_step), completed=step),
                Text(f"step {step}/{last_step}  left {duration(view.seconds_left(last_step))}"))
    return Group(bar, _figures(view), _actors(view))


def _figures(view: RunView) -> Text:
    """The course of the reward, and the newest step's numbers; wraps where the terminal is narrow."""
    cells = [(label, compact(number(view.last, name), digits)) for label, name, digits in FIGURES]
    cells += [("weights", str(view.last.get("version", "–")))]
    cells += [("GPU", peaks(view.last))] if peaks(view.last) else []
    cells += [("accuracy", compact(view.evaluations[-1][1]))] if view.evaluations else []
    line = Text(sparkline(view.series("reward/mean")), style="green")
    for label, value in cells:
        line.append(f"  {label} ", style="not green dim").append(value, style="not green not dim bold cyan")
    return line


def _actors(view: RunView) -> Text:
    text = Text()
    for actor in view.actors.values():
        mark, style = MARKS.get(actor.state, ("?", "dim"))
        restarts = f"×{actor.restarts + 1}" if actor.restarts else ""
        text.append(f"{mark} {actor.actor}{restarts}  ", style=style)
    return text


MARKS = {"ready": ("●", "green"), "starting": ("◌", "yellow"), "exited": ("✗", "red")}
BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(points: list[tuple[float, float]], width: int = 24) -> str:
    """The course of a series in one line of characters, from its lowest to its highest value."""
    values = [value for _, value in points]
    if len(values) < 2:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[at:at + size]) / len(values[at:at + size]) for at in range(0, len(values), size)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[0] * len(means)
    return "".join(BLOCKS[int((value - low) / (high - low) * (len(BLOCKS) - 1) + 0.5)] for value in means)
