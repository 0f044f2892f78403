"""Where checkpoints lie, and in which order they become the latest one.

    checkpoints/.writing-000000010/{policy/,replay_buffer.npz,job.json}  ->  checkpoints/iter_000000010/
                                                                         ->  latest_checkpoint.txt

Invariant: `latest_checkpoint.txt` names a complete checkpoint, whenever the writer is killed, the machine loses power,
or the disk stops writing. A folder `iter_…` is complete from its first moment on: it got its name when all was in it
and on the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.ledger import Key
from cosmos_actor.actors.run_directory import RunPaths, make_durable, write_whole

NAME = re.compile(r"iter_\d{9,}")
DAMAGED = (OSError, ValueError, KeyError, TypeError, IndexError)
"""What reading a damaged file raises."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint and the controller's own part of it."""

    directory: Path
    step: int
    dispatched_through: int
    buffered: tuple[Key, ...]


class Draft:
    """A checkpoint that is being written; it does not exist until `finish`."""

    def __init__(self, directory: Path, tracker: Path, relies_on: Sequence[Path] = ()) -> None:
        """`relies_on`: what else of the run a resume from it needs."""
        self.directory = directory
        self._tracker, self._relies_on = tracker, relies_on

    def finish(self, *, seed: int, step: int, dispatched_through: int, buffered: Sequence[Key]) -> None:
        """Second phase: our own part, then the name."""
        record = {
            "step": step, "dispatched_through": dispatched_through, "buffered": [list(key) for key in buffered],
            "seed": seed,
        }
        write_whole(self.directory / "job.json", json.dumps(record, indent=1))
        make_durable(self.directory)
        for path in self._relies_on:
            make_durable(path)
        finished = self.directory.parent / f"iter_{step:09d}"
        if finished.exists():
            shutil.rmtree(finished)  # of before a rewind: the job has come here a second time
        os.replace(self.directory, finished)
        make_durable(finished.parent, below=False)
        write_whole(self._tracker, finished.name + "\n", durable=True)


class Checkpoints:
    """The folder `checkpoints/` of one run."""

    def __init__(self, paths: RunPaths, *, keep_last: int) -> None:
        self.root = paths.checkpoints
        self._tracker = paths.latest_checkpoint
        self._keep_last = keep_last
        self._relies_on = (paths.identity, paths.configuration, paths.keys, paths.metrics, paths.ledger,
                           paths.ledger.with_name(paths.ledger.name + "-wal"), paths.root / "reference")

    def latest(self) -> Checkpoint | None:
        """The checkpoint that the tracker names, or None before the first. Raises UserError for a damaged one.

        Without a tracker it is the newest there is: the first was written and not yet named, or the tracker was lost.
        """
        name = self._named() if self._tracker.exists() else max(self._names(), default=None)
        if name is None:
            return None
        directory = self.root / name
        try:
            record = json.loads((directory / "job.json").read_text())
            if f"iter_{record['step']:09d}" != name:
                raise ValueError(f"it says that it is of step {record['step']}")
            return Checkpoint(directory, record["step"], int(record["dispatched_through"]),
                              tuple((key[0], key[1]) for key in record["buffered"]))
        except DAMAGED as error:
            why = f"{type(error).__name__}: {error}"
            raise self._unreadable(f"checkpoint {directory} can not be read: {why}") from error

    def _named(self) -> str:
        """What the tracker says."""
        try:
            name = self._tracker.read_text().strip()
        except DAMAGED as error:
            raise self._unreadable(f"{self._tracker} can not be read: {error}") from error
        if NAME.fullmatch(name) is None:
            raise self._unreadable(f"{self._tracker} names no checkpoint but {name[:40]!r}")
        return name

    def _unreadable(self, what: str) -> UserError:
        there = ", ".join(self._names()) or "none"
        return UserError(f"{what}; write the name of another into {self._tracker.name} (there are: {there}), or start "
                         "a new run", setting="run.run_dir")

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("iter_*"))

    @contextmanager
    def writing(self, step: int) -> Iterator[Draft]:
        """A draft of the checkpoint of `step`; removed again unless it was finished."""
        draft = Draft(self.root / f".writing-{step:09d}", self._tracker, self._relies_on)
        shutil.rmtree(draft.directory, ignore_errors=True)
        draft.directory.mkdir(parents=True)
        try:
            yield draft
        finally:
            shutil.rmtree(draft.directory, ignore_errors=True)
        self._prune()

    def next_epoch(self) -> int:
        """A number that no earlier life of this job had, kept beside the checkpoints."""
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / "epoch.txt"
        try:
            epoch = int(path.read_text()) + 1 if path.exists() or self._names() else 0
        except DAMAGED as error:
            raise UserError(f"{path} is damaged: {error}; write into it a number above that of all earlier lives, such "
                            "as 1000000", setting="run.run_dir") from error
        write_whole(path, str(epoch), durable=True)
        return epoch

    def _prune(self) -> None:
        """Keep the latest and those before it. One after it is of a life that ended before it could be named."""
        latest = self._tracker.read_text().strip()
        kept = [name for name in self._names() if name <= latest][-self._keep_last:]
        for name in set(self._names()).difference(kept):
            shutil.rmtree(self.root / name, ignore_errors=True)
