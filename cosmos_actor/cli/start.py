"""`cosmos-actor start`: one more actor, from any shell or host, for a job that is running."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated

import typer

from cosmos_actor.actors.errors import BadValue, NotFound, UnknownName
from cosmos_actor.actors.run_directory import RunPaths

NAME = "start"
EXAMPLE = "cosmos-actor start --role rollout --connect tcp://10.0.0.7:5555 --key run/keys/rollout.key"
JOINING_ROLES = ("rollout", "reward", "reference")
"""Roles that hold nothing that could be lost: an actor of them may come and go at any time."""
ADDRESS = re.compile(r"tcp://([^\s:/\[\]]+|\[[0-9A-Fa-f:.%\w]+\]):(\d{1,5})")


def command(
    role: Annotated[str, typer.Option(help=f"What it does: {', '.join(JOINING_ROLES)}.")],
    connect: Annotated[str, typer.Option(
        metavar="tcp://HOST:PORT", help="The head of the job; left out, it is read from the run directory.")] = "",
    key: Annotated[str, typer.Option(
        metavar="FILE", help="The role's key file; left out, RUN/keys/ROLE.key of --run-dir.")] = "",
    run_dir: Annotated[str, typer.Option(
        "--run-dir", metavar="RUN", help="The job's run directory, where it can be seen from here.")] = "latest",
    host: Annotated[str, typer.Option(
        help="This host's address, at which the job's other actors reach it; left out, the one from which the head is "
        "reached.")] = "",
    name: Annotated[str, typer.Option(help="The actor's name in the run; left out, ROLE-HOST-PID.")] = "",
    rejoin: Annotated[float, typer.Option(
        metavar="SECONDS", min=0, help="How long to try to join again, as a new life, when the run can not be reached "
        "any more; 0: end then.")] = 300.0,
) -> int:
    """Join a running job with one more actor. Ctrl-C lets it finish what it holds and leave; nothing is lost."""
    if role not in JOINING_ROLES:
        raise UnknownName(f"--role {role}: only {', '.join(JOINING_ROLES)} can join a running job", setting="--role")
    address = valid_address(connect, "--connect") if connect else head_address(run_dir)
    key_file = existing_key(Path(key)) if key else existing_key(_run(run_dir).keys / f"{role}.key")
    from cosmos_actor.bus.identity import new_incarnation
    from cosmos_actor.bus.limits import Limits
    from cosmos_actor.cli.preflight import descriptors
    from cosmos_actor.job.actor import run
    descriptors(Limits().min_descriptors)
    name = name or f"{role}-{socket.gethostname()}-{os.getpid()}"
    typer.echo(f"{name}: joining {address}; Ctrl-C lets it finish what it holds and leave", err=True)
    return run(role, name, address, key_file, listen=f"tcp://{host or own_host_towards(address)}:0",
               incarnation=new_incarnation(), run_dir=None, joined=True, rejoin_s=rejoin)


def valid_address(text: str, flag: str, *, first_port: int = 1) -> str:
    """`text`, if it is tcp://HOST:PORT with a port of `first_port` to 65535. Raises BadValue."""
    match = ADDRESS.fullmatch(text)
    if match is None or not first_port <= int(match[2]) <= 65535:
        raise BadValue(f"{flag} {text}: expected tcp://HOST:PORT, such as tcp://10.0.0.7:5555", setting=flag)
    return text


def own_host_towards(address: str) -> str:
    """The address that this host would send from to `address`. Sends nothing."""
    head, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        family, kind, _, _, target = socket.getaddrinfo(head.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise NotFound(f"no way from here to {address}: {error.strerror or error}", setting="--connect") from error
    return f"[{own}]" if family == socket.AF_INET6 else own


def existing_key(path: Path) -> Path:
    if not path.is_file():
        raise NotFound(f"there is no key file {path}; the job writes one a role into its run directory, keys/ROLE.key",
                       setting="--key")
    from cosmos_actor.bus.errors import KeyFileError
    from cosmos_actor.bus.keys import KeyRing
    try:
        KeyRing.load(path)
    except KeyFileError as error:
        raise BadValue(error.text, setting="--key") from error
    return path


def head_address(run: str) -> str:
    """Where the head of a run listens, from its status file. Raises NotFound when the run is not up."""
    from cosmos_actor.cli.run_state import read_status
    paths = _run(run)
    address = read_status(paths).get("head")
    if paths.owner_pid() is None or not address:
        raise NotFound(f"{paths.root} is not running, so it has no head to join; name one with --connect",
                       setting="--connect")
    return str(address)


def _run(run: str) -> RunPaths:
    from cosmos_actor.cli.runs import find_run
    return find_run(run)
