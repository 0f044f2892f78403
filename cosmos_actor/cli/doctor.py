"""`cosmos-actor doctor`: what of this host is in the way of a run, or why a run's head can not be reached from here."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cosmos_actor.actors.errors import NotFound
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.cli.arguments import JsonOption

if TYPE_CHECKING:
    from cosmos_actor.bus import Identity, KeyRing
    from cosmos_actor.cli.examination.causes import Observation

NAME = "doctor"
EXAMPLE = "cosmos-actor doctor tcp://10.0.0.7:5555 --key run/keys/rollout.key"
COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}
ROLE = "rollout"
"""Whose key is tried when nothing else was said: the role that joins most often."""


@dataclass(frozen=True)
class Question:
    """What is to be examined."""

    address: str
    """Empty: this host alone."""
    key: Path | None
    role: str
    """Empty: the key's."""
    run: RunPaths | None
    name: str


def command(
    address: Annotated[str, typer.Argument(
        metavar="[tcp://HOST:PORT]", help="The head of a run, as `status` shows it. Left out: this host, and the head "
        "of --run if that is given.", show_default=False)] = "",
    key: Annotated[str, typer.Option(metavar="FILE", help="The key to try; left out, RUN/keys/ROLE.key.")] = "",
    role: Annotated[str, typer.Option(
        metavar="ROLE", help="The role that wants to connect; left out, the key's, or rollout.")] = "",
    run: Annotated[str, typer.Option(
        "--run", metavar="RUN", help="The run that the head should be of: a run directory, its name below runs/, or "
        "latest.")] = "",
    name: Annotated[str, typer.Option(
        metavar="NAME", help="The name that the actor would have in the run, to see whether it is free.")] = "",
    as_json: JsonOption = False,
) -> int:
    """Say what is wrong, line by line: with this host, or on the way to the head of a run. Changes nothing."""
    from cosmos_actor.cli.examination.causes import exit_code
    question = asked(address, key, role, run, name)
    begun, seen = time.monotonic(), []
    for observation in examine(question):
        seen.append(observation)
        if not as_json:
            show(observation)
    code = exit_code(seen)
    if as_json:
        typer.echo(json.dumps({"address": question.address or None, "ok": code == 0, "exit_code": code, "seconds":
                               round(time.monotonic() - begun, 3), "lines": [as_plain(one) for one in seen]}))
    return code


def asked(address: str, key: str, role: str, run: str, name: str) -> Question:
    """The command's options, made whole from the run directory. Raises UserError."""
    from cosmos_actor.cli.runs import find_run
    from cosmos_actor.cli.start import existing_key, head_address, valid_address
    paths = find_run(run) if run else None
    if address:
        address = valid_address(address, "ADDRESS")
        paths = paths or _run_behind(address)
    elif run:
        address = head_address(run)
    file = existing_key(Path(key)) if key else None
    if file is None and paths is not None:
        file = existing_key(paths.keys / f"{role or ROLE}.key")
    if not address and (key or role or name):
        raise NotFound("an address is needed to try a key at: name tcp://HOST:PORT or --run", setting="ADDRESS")
    return Question(address, file, role, paths, name)


def _run_behind(address: str) -> RunPaths | None:
    """The latest run of this folder, if its head is the one that is asked about."""
    from cosmos_actor.cli.run_state import read_status
    from cosmos_actor.cli.runs import find_run
    try:
        paths = find_run("latest")
    except NotFound:
        return None
    return paths if read_status(paths).get("head") == address else None


def examine(question: Question) -> Iterator[Observation]:
    """The lines, as they are found. Whatever is wrong, the last one comes within 5 s."""
    if not question.address:
        from cosmos_actor.cli.examination.host import this_host
        yield from this_host()
        return
    from cosmos_actor.cli.examination.causes import Observation
    from cosmos_actor.cli.examination.reach import reach
    host, _, port = question.address.removeprefix("tcp://").rpartition(":")
    for line in reach(host.strip("[]"), int(port)):
        yield line
        if line.mark == "bad":
            return
    if question.key is None:
        yield Observation("handshake", "warn", "not tried: that needs a key of the run",
                          "name one with --key, or the run directory with --run", "--key")
        return
    yield from _with_key(question, question.key)


def _with_key(question: Question, file: Path) -> Iterator[Observation]:
    """What the key file says by itself, and then the handshake."""
    from cosmos_actor.bus import Identity, KeyRing, new_incarnation
    from cosmos_actor.cli.examination.causes import KEY_ROLE, OTHER_RUN, bad
    keys = KeyRing.load(file)
    role = question.role or keys.role
    if keys.role != role:
        yield bad("key", KEY_ROLE, f"{file} belongs to {keys.role}, not to {role}")
        return
    run_id = question.run.describe()["run_id"] if question.run is not None else keys.run_id
    if keys.run_id != run_id:
        yield bad("key", OTHER_RUN, f"{file} is of run {keys.run_id}, {question.run.root} is run {run_id}")
        return
    name = question.name or f"doctor-{socket.gethostname()}-{os.getpid()}"
    yield from _handshake(question.address, Identity(keys.run_id, role, name, new_incarnation()), keys)


def _handshake(address: str, identity: Identity, keys: KeyRing) -> Iterator[Observation]:
    """The lines of a coroutine's own loop, one by one."""
    from cosmos_actor.cli.examination.handshake import shake_hands
    loop, lines = asyncio.new_event_loop(), shake_hands(address, identity, keys)

    async def following() -> Observation | None:
        return await anext(lines, None)

    try:
        while (line := loop.run_until_complete(following())) is not None:
            yield line
    finally:
        loop.close()


def show(line: Observation) -> None:
    cure = f" → {line.cure} (setting `{line.setting}`)" if line.cure else ""
    typer.echo(f"{typer.style(f'{line.mark:4}', fg=COLOURS[line.mark])} {line.what}: {line.value}{cure}")


def as_plain(line: Observation) -> dict[str, Any]:
    cause = line.cause
    return {"what": line.what, "mark": line.mark, "value": line.value, "cure": line.cure or None,
            "setting": line.setting or None, "cause": cause.name if cause else None,
            "exit_code": cause.exit_code if cause else None}
