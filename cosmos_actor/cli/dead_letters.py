"""`cosmos-actor dead-letters`: work that nobody did, and the messages that killed whoever took them."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from typing import Annotated, Any

import typer

from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.cli.arguments import JsonOption, RunArgument

NAME, EXAMPLE = "dead-letters", "cosmos-actor dead-letters latest --show 0001-reward-score_request"
SHOWN_VALUES = 16
"""Values of an array that are printed for a person; --json has all of them."""


def command(
    run: RunArgument = "latest",
    show: Annotated[str, typer.Option(
        metavar="NAME", help="Print a message of the quarantine, field by field.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List the work of a run that was given up, with the reason, and what is in quarantine."""
    from cosmos_actor.cli.runs import find_run
    paths = find_run(run)
    if show:
        _show(paths, show, as_json)
    else:
        _list(paths, as_json)


def _list(paths: RunPaths, as_json: bool) -> None:
    from cosmos_actor.actors.dead_letters import read_dead_letters
    letters = read_dead_letters(paths)
    if as_json:
        typer.echo(json.dumps(letters))
    elif not letters:
        typer.echo(f"{paths.root}: nothing was given up")
    else:
        _print(letters)


def _print(letters: list[dict[str, Any]]) -> None:
    """One line each, so that it can be searched."""
    for letter in letters:
        time = datetime.fromtimestamp(letter["time"]).strftime("%Y-%m-%d %H:%M:%S")
        groups = f", {len(letter['groups'])} groups" if letter["groups"] else ""
        typer.echo(f"{time} {letter['kind']}: {letter['what']} (role {letter['role']}{groups}): {letter['reason']}")


def _show(paths: RunPaths, name: str, as_json: bool) -> None:
    from cosmos_actor.actors.dead_letters import quarantine_of
    from cosmos_actor.actors.errors import NotFound
    from cosmos_actor.job.quarantined import load_quarantined
    folder = quarantine_of(paths)
    names = sorted(path.stem for path in folder.glob("*.json"))
    if name not in names:
        raise NotFound(f"nothing named {name} is in quarantine; there is: {', '.join(names) or 'nothing'}")
    about = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    if about["payload"] is None:
        raise NotFound(f"{name}: {about['problem']}")
    message = as_plain(load_quarantined(folder / about["payload"]), short=not as_json)
    if as_json:
        typer.echo(json.dumps({**about, "content": message}))
        return
    typer.echo(about["reason"])
    typer.echo(json.dumps(message, indent=1, ensure_ascii=False))


def as_plain(value: Any, *, short: bool) -> Any:
    """A message as plain objects. Arrays are lists, or, `short`, one line with dtype, shape and the first values."""
    import numpy as np
    if dataclasses.is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name), short=short) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return _line(value) if short else value.tolist()
    if isinstance(value, dict):
        return {key: as_plain(item, short=short) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item, short=short) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def _line(array: Any) -> str:
    values = ", ".join(f"{value:g}" for value in array.reshape(-1)[:SHOWN_VALUES].tolist())
    more = ", …" if array.size > SHOWN_VALUES else ""
    return f"{array.dtype} {list(array.shape)}: {values}{more}"
