"""`cosmos-actor stop`: drain, then stop, then kill; each step bounded, the outcome counted."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Annotated, Any

import typer

from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.cli.arguments import JsonOption, RunArgument

NAME, EXAMPLE = "stop", "cosmos-actor stop latest"
NOW_S = 10.0
"""With --now: time for the supervisor to stop its children before it is killed with them."""
AFTERMATH_S = 5.0
"""After a kill of the supervisor its processes are gone within this, or something is wrong that has to be reported."""
MARGIN_S = 10.0
"""On top of what the job's own limits allow: closing files and writing the report."""


def command(
    run: RunArgument = "latest",
    now: Annotated[bool, typer.Option("--now", help="Do not finish the step in hand.")] = False,
    deadline: Annotated[float, typer.Option(
        "--deadline", metavar="SECONDS", help="Kill what is left after so long; left out, the job's own limits "
        "(supervisor.drain_s + supervisor.stop_s).")] = 0.0,
    as_json: JsonOption = False,
) -> int:
    """Stop a run. Its supervisor finishes and saves the step in hand, then stops every actor; `up --resume` goes on."""
    from cosmos_actor.cli.run_state import run_state
    from cosmos_actor.cli.runs import find_run
    paths = find_run(run)
    before, begun = run_state(paths), time.monotonic()
    if not before["running"]:
        return _say({"run_dir": str(paths.root), "stopped": False, "reason": "it was not running"}, as_json)
    killed = _stop(paths, before["supervisor_pid"], now=now, deadline_s=deadline or _deadline(paths, now))
    after = _aftermath(paths)
    return _say({
        "run_dir": str(paths.root), "stopped": True, "killed": killed, "seconds": round(time.monotonic() - begun, 2),
        "processes_ended": before["processes"] - after["processes"], "processes_left": after["processes"],
        "step": after["step"], "ledger": after["ledger"],
    }, as_json, failed=bool(after["processes"]) or (killed and not now))


def _deadline(paths: RunPaths, now: bool) -> float:
    from cosmos_actor.recipes.resolved import load_resolved
    if now:
        return NOW_S
    limits = load_resolved(paths.configuration).supervisor
    return limits.drain_s + limits.stop_s + MARGIN_S


def _stop(paths: RunPaths, pid: int, *, now: bool, deadline_s: float) -> bool:
    """Ask, and kill when the deadline is over; whether that was needed. The descriptor keeps a reused number safe."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if paths.owner_pid() != pid:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if now and not _ended(descriptor, 0.2):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if _ended(descriptor, deadline_s):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        _ended(descriptor, AFTERMATH_S)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def _ended(descriptor: int, deadline_s: float) -> bool:
    """Whether the process ends within the deadline."""
    return bool(select.select([descriptor], [], [], deadline_s)[0])


def _aftermath(paths: RunPaths) -> dict[str, Any]:
    """The state once no process is left, or after AFTERMATH_S."""
    from cosmos_actor.cli.run_state import run_state
    until = time.monotonic() + AFTERMATH_S
    while (state := run_state(paths))["processes"] and time.monotonic() < until:
        time.sleep(0.1)
    return state


def _say(result: dict[str, Any], as_json: bool, *, failed: bool = False) -> int:
    from cosmos_actor.cli.status import ledger_line
    if as_json:
        typer.echo(json.dumps(result))
    elif not result["stopped"]:
        typer.echo(f"{result['run_dir']}: {result['reason']}")
    else:
        how = "killed" if result["killed"] else "stopped"
        typer.echo(f"{result['run_dir']} {how} in {result['seconds']:.1f} s after step {result['step']}: "
                   f"{result['processes_ended']} processes ended, {result['processes_left']} left")
        typer.echo(ledger_line(result["ledger"]))
    return 1 if failed else 0
