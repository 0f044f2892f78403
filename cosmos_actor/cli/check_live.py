"""`cosmos-actor check --live`: each edge of a running job, asked from both of its ends."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import typer

from cosmos_actor.actors.errors import NotFound
from cosmos_actor.actors.role_names import REGISTRY, REGISTRY_ACTOR

if TYPE_CHECKING:
    from cosmos_actor.actors.run_directory import RunPaths
    from cosmos_actor.bus import Bus
    from cosmos_actor.cli.examination.edges import Edge, Links

ASK_DEADLINE_S = 3.0
"""An actor answers from its loop in milliseconds, whatever its worker computes; one that does not is stuck or gone."""
AT_ONCE = 64
"""Actors asked at the same time, so that a thousand of them need no thousand sockets."""
ASKING_ROLE = "rollout"
"""Whose key is used. It is no hub of a run: nobody sends it work that it did not ask for."""
MIB = 2**20


def check_live(run: str, *, as_json: bool) -> int:
    """Print every edge; 1 when one that should be up is not."""
    from cosmos_actor.cli.examination.edges import edges
    from cosmos_actor.cli.runs import find_run
    paths = find_run(run)
    asked = whom_to_ask(paths)
    said = asyncio.run(ask_all(paths, asked))
    found = edges(said, planned(paths) | (set(asked) - {REGISTRY_ACTOR}))
    if as_json:
        rows = [{**asdict(edge), "bad": edge.bad} for edge in found]
        typer.echo(json.dumps({"run_dir": str(paths.root), "ok": not any(edge.bad for edge in found), "edges": rows}))
    else:
        show(found)
    for edge in found:
        if edge.bad:
            typer.echo(f"error: {edge.a} – {edge.b} is not up: {edge.why}", err=True)
    return 1 if any(edge.bad for edge in found) else 0


class StillStarting(NotFound):
    """It runs, and has no head yet, or never will have one."""


def whom_to_ask(paths: RunPaths, setting: str = "--live") -> dict[str, tuple[str, str]]:
    """Actor -> its role and address, as the head last wrote them. Raises NotFound for a run that is not up,
    StillStarting while it has no head."""
    from cosmos_actor.cli.run_state import read_status
    status = read_status(paths)
    head = str(status.get("head") or "")
    if paths.owner_pid() is None:
        raise NotFound(f"{paths.root} is not running, so nobody can be asked", setting=setting)
    if not head.startswith("tcp://"):
        raise StillStarting(f"{paths.root} is still starting, or runs in one process: nobody can dial its actors",
                            setting=setting)
    members = {member["actor"]: (member["role"], member["address"]) for member in status.get("members", ())
               if not member["leaving"]}
    return {REGISTRY_ACTOR: (REGISTRY, head), **members}


def planned(paths: RunPaths) -> set[str]:
    """The actors that the supervisor keeps alive."""
    from cosmos_actor.recipes.plan import plan
    from cosmos_actor.recipes.resolved import load_resolved
    return {"controller-0", *(actor.actor for actor in plan(load_resolved(paths.configuration)).actors)}


@asynccontextmanager
async def asking(paths: RunPaths) -> AsyncIterator[Bus]:
    """Somebody who may dial every actor of the run, and takes no part in it."""
    from cosmos_actor.bus import Bus, Identity, KeyRing, Limits, ZmqTransport, new_incarnation
    keys = KeyRing.load(paths.keys / f"{ASKING_ROLE}.key")
    name = f"check-{socket.gethostname()}-{os.getpid()}"
    limits = replace(Limits(), shared_bytes=0)  # one question each is not worth a ring and a lane
    bus = Bus(Identity(keys.run_id, ASKING_ROLE, name, new_incarnation()), ZmqTransport(), keys, limits=limits)
    await bus.start(None)
    try:
        yield bus
    finally:
        await bus.close(drain_s=0.0)


async def ask_all(paths: RunPaths, asked: dict[str, tuple[str, str]]) -> dict[str, Links | str]:
    """Of each its links, or one line about why it did not answer."""
    turns = asyncio.Semaphore(AT_ONCE)

    async with asking(paths) as bus:
        async def ask(actor: str, role: str, address: str) -> Links | str:
            async with turns:
                return await ask_one(bus, actor, role, address)

        answers = await asyncio.gather(*(ask(actor, *where) for actor, where in asked.items()))
    return dict(zip(asked, answers, strict=True))


async def ask_one(bus: Bus, actor: str, role: str, address: str) -> Links | str:
    from cosmos_actor.actors.messages import AskLinks
    from cosmos_actor.bus import BusError
    until = time.monotonic() + ASK_DEADLINE_S
    try:
        link = await bus.connect(address, role=role, actor=actor, deadline_s=ASK_DEADLINE_S)
        answer = await link.call(AskLinks(), deadline_s=max(0.0, until - time.monotonic()))
    except BusError as error:
        return error.text
    return {one.actor: one for one in answer.links}


def show(found: list[Edge]) -> None:
    """A line an edge, in columns."""
    rows = [cells(edge) for edge in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def cells(edge: Edge) -> list[str]:
    """State, edge, and what its ends say of it; ? for an end that says nothing."""
    begin = ["up" if edge.up else "DOWN" if edge.wanted else "down", f"{edge.a} – {edge.b}"]
    if edge.silent_s is None:
        return [*begin, "", "", "", "", "", edge.why]
    there, back = ("?" if count is None else count for count in edge.under_way)
    lane = f"lane {edge.lane_messages}, ring {edge.ring_arrays}" if edge.lane else "by the socket"
    busy = f" ({edge.busy})" if edge.busy else ""
    return [*begin, f"wires {edge.wires}", f"silent {edge.silent_s:.1f} s{busy}", f"under way {there}→ ←{back}",
            f"credit {edge.credit_messages}, {(edge.credit_bytes or 0) / MIB:.0f} MiB", lane, edge.why]
