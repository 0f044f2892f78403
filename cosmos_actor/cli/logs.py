"""`cosmos-actor logs`: what an actor wrote, life by life."""

from __future__ import annotations

import difflib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from cosmos_actor.actors.errors import NotFound, UnknownName, UserError
from cosmos_actor.actors.run_directory import RunPaths

NAME, EXAMPLE = "logs", "cosmos-actor logs latest rollout-0 -f"
POLL_S = 0.2


def command(
    words: Annotated[list[str] | None, typer.Argument(
        metavar="[RUN] [ACTOR]", help="A run (default latest) and an actor such as rollout-0; without an actor, the "
        "actors that have logs are listed.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, through restarts, "
                                         "until the run ends.")] = False,
    incarnation: Annotated[str, typer.Option(help="One life of the actor; left out, the newest.")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Only so many lines from the end; 0 = all.")] = 0,
) -> None:
    """Print an actor's log."""
    paths, actor = _meant(words or [])
    if not actor:
        _list(paths)
        return
    logs = _logs_of(paths, actor)
    log = _chosen(logs, incarnation)
    if len(logs) > 1 and not incarnation:
        typer.echo(f"life {len(logs)} of {len(logs)}, incarnation {log.stem}", err=True)
    offset = _print_from(log, _offset_of_last(log, lines))
    if follow:
        _follow(paths, actor, log, offset, forever=not incarnation)


def _meant(words: list[str]) -> tuple[RunPaths, str]:
    """[RUN] [ACTOR]: one word alone is an actor of the latest run if that has one of this name, else a run."""
    from cosmos_actor.cli.runs import find_run
    if len(words) > 2:
        raise UserError(f"logs takes a run and an actor, not {len(words)} words")
    if len(words) == 2:
        return find_run(words[0]), words[1]
    if not words:
        return find_run("latest"), ""
    try:
        return find_run(words[0]), ""
    except NotFound:
        return find_run("latest"), words[0]


def _actors(paths: RunPaths) -> list[str]:
    return sorted(path.name for path in paths.logs.iterdir() if path.is_dir()) if paths.logs.is_dir() else []


def _list(paths: RunPaths) -> None:
    for actor in _actors(paths):
        typer.echo(f"{actor}  {' '.join(log.stem for log in paths.logs_of(actor))}")


def _logs_of(paths: RunPaths, actor: str) -> list[Path]:
    logs = paths.logs_of(actor) if actor in _actors(paths) else []
    if logs:
        return logs
    nearest = difflib.get_close_matches(actor, _actors(paths), n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(_actors(paths)) or 'none'}"
    raise UnknownName(f"{paths.root} has no log of {actor}; {hint}")


def _chosen(logs: list[Path], incarnation: str) -> Path:
    if not incarnation:
        return logs[-1]
    found = [log for log in logs if log.stem.startswith(incarnation)]
    if len(found) != 1:
        lives = ", ".join(log.stem for log in logs)
        begin = "several lives begin" if found else "no life begins"
        raise UnknownName(f"{begin} with {incarnation}; there are {lives}", setting="--incarnation")
    return found[0]


def _offset_of_last(log: Path, lines: int) -> int:
    """Where the last `lines` lines begin."""
    if not lines:
        return 0
    data = log.read_bytes()
    at = len(data.rstrip(b"\n"))
    for _ in range(lines):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return 0
    return at + 1


def _print_from(log: Path, offset: int) -> int:
    """Copy the log to stdout, byte for byte, and return where it ended."""
    with log.open("rb") as file:
        file.seek(offset)
        data = file.read()
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return offset + len(data)


def _follow(paths: RunPaths, actor: str, log: Path, offset: int, *, forever: bool) -> None:
    """Go on until the run is over, into the next life when there is one."""
    running = True
    while running:
        running = paths.owner_pid() is not None
        offset = _print_from(log, offset)
        newest = paths.logs_of(actor)[-1]
        if forever and newest != log:
            typer.echo(f"next life of {actor}, incarnation {newest.stem}", err=True)
            log, offset = newest, 0
        elif running:
            time.sleep(POLL_S)
