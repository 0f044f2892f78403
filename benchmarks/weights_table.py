"""What the benchmarks of the weight plane share: a table of rates, each beside its ceiling, and another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEADLINE_S = 600.0
PEER = Path(__file__).with_name("weights_peer.py")


@dataclass
class Row:
    """One measurement; `share` is of the ceiling above it in the table."""

    way: str
    what: str
    nbytes: int
    seconds: float
    share: float | None = None

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.seconds / 1e9


class Table:
    """What was measured so far, printed as it comes, and written to `path` each time: what follows may fail."""

    def __init__(self, rounds: int, path: Path | None = None) -> None:
        self.rows: list[Row] = []
        self._rounds, self._path = rounds, path

    def best(self, *actions: Callable[[], object]) -> list[float]:
        """Seconds of each one's quickest round, after one that warms up. They take turns, so that other load on the
        machine meets all of them."""
        took: list[list[float]] = [[] for _ in actions]
        for _ in range(self._rounds + 1):
            for times, action in zip(took, actions, strict=True):
                begun = time.perf_counter()
                action()
                times.append(time.perf_counter() - begun)
        return [min(times[1:]) for times in took]

    def add(self, way: str, what: str, nbytes: int, seconds: float, ceiling: Row | None = None) -> Row:
        row = Row(way, what, nbytes, seconds)
        row.share = None if ceiling is None else row.gb_s / ceiling.gb_s
        self.rows.append(row)
        if self._path is not None:
            self._path.write_text(json.dumps([{**vars(one), "gb_s": one.gb_s} for one in self.rows], indent=1) + "\n")
        share = "ceiling" if ceiling is None else f"{row.share:6.2f}"
        print(f"{way:10} {what:44} {seconds * 1e3:10.1f} ms {row.gb_s:8.2f} GB/s {share:>8}", flush=True)
        return row

    def against(self, way: str, nbytes: int, ceiling: tuple[str, Callable[[], object]],
                *others: tuple[str, Callable[[], object]]) -> Row:
        """The ceiling, which is returned, and each of the others beside it."""
        seconds = self.best(ceiling[1], *(action for _, action in others))
        top = self.add(way, ceiling[0], nbytes, seconds[0])
        for (what, _), took in zip(others, seconds[1:], strict=True):
            self.add(way, what, nbytes, took, top)
        return top


def within(limit_s: float, command: Sequence[object]) -> str:
    """Run it, with what it prints, and end it and all that it started after `limit_s`. Why it failed; empty: it did
    not."""
    process = subprocess.Popen([str(word) for word in command], start_new_session=True)
    try:
        code = process.wait(max(limit_s, 0.0))
        return f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def peer(*words: object) -> Iterator[Any]:
    """The other process; gives what it said about where it is."""
    process = subprocess.Popen([sys.executable, str(PEER), *map(str, words)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        said = process.stdout.readline()
        if not said:
            raise SystemExit(f"{' '.join(map(str, words))} ended with {process.wait()}")
        yield json.loads(said)
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
