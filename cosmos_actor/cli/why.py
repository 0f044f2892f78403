"""`cosmos-actor why`: who waits for whom in a live run, and who is likely the cause, in one screen."""

from __future__ import annotations

import json
import time
from typing import Any

import typer

from cosmos_actor.cli.arguments import JsonOption, RunArgument

NAME, EXAMPLE = "why", "cosmos-actor why latest"
OLD_S = 3.0
"""The registry writes every second, and hears the supervisor as often. Who says nothing for longer does not get on."""


def command(run: RunArgument = "latest", as_json: JsonOption = False) -> None:
    """Say why a run does not get on: who is stuck, gone or busy, and who waits for it. Works beside a running job."""
    from cosmos_actor.cli.runs import find_run
    answer = explanation(find_run(run))
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        for line in answer["lines"]:
            typer.echo(line)


def explanation(paths: Any) -> dict[str, Any]:
    """All that `why --json` prints: running, age_s (of what is known), nodes, waits, causes, cycles, stuck, lines."""
    from dataclasses import asdict

    from cosmos_actor.actors.processes import process_state, with_processes
    from cosmos_actor.actors.wait_graph import graph_of, lines
    from cosmos_actor.cli.run_state import read_run, read_status
    owner, status, view = paths.owner_pid(), read_status(paths), read_run(paths)
    if owner is None:
        return {"running": False, "lines": [f"{paths.root} is not running: {_end_of(paths)}"]}
    if not status:
        return {"running": True, "lines": [
            f"{paths.root}: its head has written no status.json; a run in one process (--inproc) has none"]}
    age_s = max(0.0, time.time() - float(status.get("time", 0.0)))
    graph = graph_of(with_processes(status))
    head = [f"{paths.root}: step {view.last.get('step') or 0}, nothing got done for {status.get('still_s', 0.0):.0f} s"]
    if age_s > OLD_S:
        registry = int(status.get("pid") or 0)
        head += [f"the registry, process {registry}, has said nothing for {age_s:.0f} s: it is "
                 f"{process_state(registry)}", f"what follows is {age_s:.0f} s old"]
    silent_s = status.get("supervisor_silent_s", 0.0)
    if silent_s is None:
        head += [f"the supervisor, process {owner}, has no link to the registry: it is {process_state(owner)}"]
    elif silent_s > OLD_S:
        head += [f"the supervisor, process {owner}, has said nothing to the registry for {silent_s:.0f} s: it is "
                 f"{process_state(owner)}"]
    return {
        "running": True, "age_s": round(age_s, 2), "still_s": status.get("still_s"), "stuck": status.get("stuck", {}),
        "nodes": {actor: asdict(node) for actor, node in graph.nodes.items()},
        "waits": [asdict(wait) for wait in graph.waits], "causes": [node.actor for node in graph.causes()],
        "cycles": graph.cycles(), "lines": [*head, *lines(graph)],
    }


def _end_of(paths: Any) -> str:
    """How the run ended, by its events."""
    from cosmos_actor.actors.json_lines import read_json_lines
    ends = [event for event in read_json_lines(paths.events) if event.get("event") == "ended"]
    return str(ends[-1].get("reason")) if ends else "it left no word of its end"
