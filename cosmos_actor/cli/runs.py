"""Finding run directories, and naming new ones: `runs/<name>-<n>`, with `runs/latest` pointing at the newest."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cosmos_actor.actors.errors import NotFound
from cosmos_actor.actors.run_directory import RunPaths

RUNS = Path("runs")
LATEST = "latest"


def find_run(text: str, runs: Path = RUNS) -> RunPaths:
    """The run that is meant by a path, by a name below `runs/`, or by `latest`. Raises NotFound with what there is."""
    for candidate in (Path(text), runs / text):
        if (candidate / "run.json").is_file():
            return RunPaths(candidate.resolve())
    raise NotFound(f"there is no run `{text}`{_instead(text, runs)}")


def _instead(text: str, runs: Path) -> str:
    names = [path.name for path in _runs(runs)]
    if not names:
        return f": no run directory below {runs}/, and {text} is none; start one with `cosmos-actor up`"
    nearest = difflib.get_close_matches(text, names, n=1)
    return f"; did you mean `{nearest[0]}`?" if nearest else f"; there are {', '.join(names[-5:])}"


def _runs(runs: Path) -> Iterator[Path]:
    if runs.is_dir():
        yield from sorted(path for path in runs.iterdir() if not path.is_symlink() and (path / "run.json").is_file())


def claim_next(name: str, runs: Path = RUNS) -> Path:
    """Make and return `runs/<name>-<n>`, n one above the highest. Two callers never get the same."""
    runs.mkdir(parents=True, exist_ok=True)
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    taken = [int(match[1]) for path in runs.iterdir() if (match := pattern.fullmatch(path.name))]
    number = max(taken, default=0) + 1
    while True:
        directory = runs / f"{name}-{number}"
        try:
            directory.mkdir()
            return directory
        except FileExistsError:
            number += 1


def newest_of(name: str, runs: Path = RUNS) -> RunPaths:
    """The run of this name with the highest number. Raises NotFound."""
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    numbered = [(int(match[1]), path) for path in _runs(runs) if (match := pattern.fullmatch(path.name))]
    if not numbered:
        raise NotFound(f"there is no run of `{name}` below {runs}/ to resume; name it with --run-dir")
    return RunPaths(max(numbered)[1])


def point_latest(directory: Path, runs: Path = RUNS) -> None:
    """Let `runs/latest` point at `directory`, wherever that is; atomically."""
    runs.mkdir(parents=True, exist_ok=True)
    scratch = runs / f".{LATEST}.{os.getpid()}"
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(os.path.relpath(directory.resolve(), runs.resolve()))
    scratch.replace(runs / LATEST)
