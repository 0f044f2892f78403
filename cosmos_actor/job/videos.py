"""Where the videos of evaluations lie, and how long.

    videos/step_000050/reach-trial-007-failure.mp4

Invariant: nothing is removed but files that have such names, in folders that have such names, and folders that are
empty then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cosmos_actor.actors.run_directory import write_whole
from cosmos_actor.simulator_bridge.contract import FAILURE, SUCCESS

UNFIT = re.compile(r"[^\w.-]+", re.ASCII)
"""What a file's name has no room for."""
LONGEST_NAME = 120
"""Characters of a task in it; file systems have 255 bytes."""
FOLDER = re.compile(r"step_(\d{6,})")
OWN = re.compile(r".+-trial-\d{3,}-(success|failure|ended)\.mp4")


def write_videos(root: Path, step: int, records: Sequence[Mapping[str, Any]],
                 videos: Mapping[str, bytes]) -> Iterator[tuple[str, Path]]:
    """Write what `videos` (by unit) has of the evaluation after `step`, in the place of what it left before the run
    went back; yields each unit and its file as soon as that is there. Raises OSError."""
    folder, written = root / f"step_{step:06d}", 0
    _remove(folder)
    for record in records:
        if record["unit"] in videos:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / video_name(record)
            if path.exists():  # of a task whose name is the same but for what no file's name has
                path = path.with_name(f"{written}-{path.name}")
            write_whole(path, videos[record["unit"]])
            written += 1
            yield record["unit"], path


def prune(root: Path, step: int, keep: int) -> None:
    """Remove the videos of all evaluations up to `step` but the newest `keep`; 0 keeps all. Raises OSError.

    Those of later steps are of before a rewind: they will be replaced.
    """
    steps = {folder: int(found[1]) for folder in root.glob("step_*") if (found := FOLDER.fullmatch(folder.name))}
    filmed = sorted((folder for folder, of in steps.items() if of <= step and _own(folder)), key=steps.__getitem__)
    for folder in filmed[:-keep] if keep else []:
        _remove(folder)


def _own(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.mp4") if OWN.fullmatch(path.name) and not folder.is_symlink()]


def _remove(folder: Path) -> None:
    own = _own(folder)
    for path in own:
        path.unlink()
    if own:
        with suppress(OSError):  # somebody else has put something there
            folder.rmdir()


def video_name(record: Mapping[str, Any]) -> str:
    """TASK-trial-007-success.mp4"""
    task, _, trial = str(record["unit"]).rpartition("/")
    outcome = {SUCCESS: "success", FAILURE: "failure"}.get(record["success"], "ended")
    return f"{UNFIT.sub('_', task)[:LONGEST_NAME]}-trial-{trial.zfill(3)}-{outcome}.mp4"
