"""`cosmos-actor status`: how a run is, or how it ended."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import typer

from cosmos_actor.cli.arguments import JsonOption, RunArgument
from cosmos_actor.cli.screen import plain, table
from cosmos_actor.weight_plane.shown_digest import shown

NAME, EXAMPLE = "status", "cosmos-actor status latest --json"


def command(run: RunArgument = "latest", as_json: JsonOption = False) -> None:
    """Show a run's actors, step, weight versions and the balance of its ledger. Works beside a running job."""
    from cosmos_actor.cli.run_state import run_state
    from cosmos_actor.cli.runs import find_run
    state = run_state(find_run(run))
    if as_json:
        typer.echo(json.dumps(state))
    else:
        _print(state)


def _print(state: dict[str, Any]) -> None:
    from rich.console import Console
    console = Console(highlight=False)
    word = f"running, supervisor {state['supervisor_pid']}" if state["running"] else "not running"
    console.print(plain(f"{state['run_dir']}  {word}"), style="bold", soft_wrap=True)
    console.print(plain(progress_line(state)), soft_wrap=True)
    actors = table("actor", "state", "pid", "restarts", "weights", "last reason")
    for actor in state["actors"]:
        doing = (f" ({actor['doing']})" if actor["doing"] else "") + (" stuck" if actor["stuck"] else "")
        actors.add_row(*map(plain, (
            actor["actor"], actor["state"] + doing, actor["pid"] if actor["alive"] else "–", actor["restarts"],
            held_line(actor), actor["stuck"] or actor["last_reason"] or "–")))
    if state["actors"]:
        console.print(actors)
    for interpreter, names in interpreters(state["actors"]).items():
        console.print(plain(f"{interpreter} runs {', '.join(names)}"), soft_wrap=True)
    console.print(plain(ledger_line(state["ledger"])), soft_wrap=True)


def held_line(actor: dict[str, Any]) -> str:
    """Version and digest of what it holds, and whether that version was published so."""
    weights = actor.get("weights")
    if not weights:
        return actor["weights_held"] or "–"
    since = datetime.fromtimestamp(weights["since"]).strftime("%H:%M:%S")
    word = {True: "as published", False: "NOT as published", None: "held"}[weights["as_published"]]
    word = "published" if actor["role"] == "policy" else word
    return f"{weights['version']} {shown(weights['digest'])} {word} since {since}"


def interpreters(actors: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Interpreter -> the actors it runs."""
    found: dict[str, list[str]] = {}
    for actor in actors:
        found.setdefault(actor["interpreter"] or "an unknown interpreter", []).append(actor["actor"])
    return found


def progress_line(state: dict[str, Any]) -> str:
    from cosmos_actor.cli.progress import FIGURES
    from cosmos_actor.cli.run_view import compact, number
    metrics = state["metrics"]
    facts = [f"step {state['step']}/{state['last_step'] or '?'} {state['phase'] or ''}".rstrip()]
    facts += [f"{label} {compact(number(metrics, name), digits)}" for label, name, digits in FIGURES
              if number(metrics, name) is not None]
    facts += [f"weights {state['version']}"] if state["version"] is not None else []
    return " · ".join(facts)


def ledger_line(balance: dict[str, Any] | None) -> str:
    """dispatched = trained + dropped + buffered + in flight, in one line."""
    if balance is None:
        return "ledger: nothing dispatched yet"
    parts = [f"{balance['trained']} trained", f"{balance['buffered']} buffered", f"{balance['in_flight']} in flight",
             *(f"{count} dropped ({reason})" for reason, count in balance["dropped"].items())]
    verdict = "balances" if balance["balanced"] else "does NOT balance"
    return f"ledger {verdict}: {balance['dispatched']} dispatched = {' + '.join(parts)}"
