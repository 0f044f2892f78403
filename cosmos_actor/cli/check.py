"""`cosmos-actor check`: everything about a run that can be known without starting it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cosmos_actor.actors.errors import UserError
from cosmos_actor.cli.arguments import JsonOption, SetOption
from cosmos_actor.cli.screen import plain, table

NAME, EXAMPLE = "check", "cosmos-actor check grpo-arithmetic --set rollout.count=2"


def command(
    recipe: Annotated[str, typer.Argument(
        help="A packaged recipe or the path of a TOML file; with --live, a run.", show_default=False)] = "",
    settings: SetOption = None,
    run_dir: Annotated[str, typer.Option("--run-dir", help="Where the run would be written.")] = "",
    explain: Annotated[bool, typer.Option("--explain", help="List every setting: value, unit, reason.")] = False,
    live: Annotated[bool, typer.Option(
        "--live", help="Ask a running job instead: each edge between two actors, from both of its ends.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Check a recipe: its settings, placement, model, interpreters, run directory and ports. Starts nothing."""
    if live:
        from cosmos_actor.cli.check_live import check_live
        return check_live(recipe or "latest", as_json=as_json)
    if not recipe:
        raise UserError("name a recipe, or a run with --live", setting="RECIPE")
    from cosmos_actor.cli.preflight import preflight
    from cosmos_actor.recipes.resolve import resolve

    resolved = resolve(recipe, settings or ())
    if explain:
        _print_settings(resolved, as_json)
        return 0
    directory = run_dir or resolved.run.run_dir
    findings = preflight(resolved, Path(directory) if directory else None)
    (_print_json if as_json else _print_tables)(resolved, findings)
    for finding in findings:
        if not finding.ok:
            typer.echo(f"error: {finding.line}", err=True)
    return 0 if all(finding.ok for finding in findings) else 2


def _print_json(settings: Any, findings: list[Any]) -> None:
    from cosmos_actor.recipes.settings import digest
    typer.echo(json.dumps({
        "ok": all(finding.ok for finding in findings), "digest": digest(settings),
        "findings": [vars(finding) for finding in findings], "placement": _placement_rows(settings),
        "settings": settings.model_dump(mode="json"),
    }))


def _placement_rows(settings: Any) -> list[dict[str, Any]]:
    """One object an actor; none when there is no legal placement."""
    from cosmos_actor.recipes.plan import plan
    try:
        actors = plan(settings).actors
    except UserError:
        return []
    own = 0 if settings.run.grouping == "single" else len(actors)
    controller = {"actor": "controller-0", "role": "controller", "process": own, "device": "cpu", "devices": [],
                  "ranks": 1, "threads": 1, "python": sys.executable}
    return [controller, *({"actor": one.actor, "role": one.role, "process": one.process, "device": one.device,
             "devices": list(one.devices), "ranks": one.ranks, "threads": one.threads, "python": one.python}
            for one in actors)]


def _print_tables(settings: Any, findings: list[Any]) -> None:
    from rich.console import Console

    from cosmos_actor.recipes.settings import digest
    console = Console(highlight=False)
    console.print(f"[bold]{settings.run.name}[/bold]  {settings.run.steps} steps, seed {settings.run.seed}, "
                  f"digest {digest(settings)[:12]}")
    rows = table("actor", "process", "device", "ranks", "threads", "interpreter")
    for row in _placement_rows(settings):
        rows.add_row(row["actor"], str(row["process"]), ",".join(row["devices"]) or row["device"], str(row["ranks"]),
                      str(row["threads"]), row["python"])
    if rows.row_count:
        console.print(rows)
    for finding in findings:
        mark = "[green]✓[/green]" if finding.ok else "[red]✗[/red]"
        console.print(mark, f"{finding.what}:", plain(finding.line), soft_wrap=True)


def _print_settings(settings: Any, as_json: bool) -> None:
    from rich.console import Console

    from cosmos_actor.recipes.sections import field_notes
    from cosmos_actor.recipes.settings import fields, values
    now = values(settings)
    rows = [{"setting": path, "value": now[path], "unit": field_notes(field)[0], "why": field.description or ""}
            for path, field in fields()]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    console = Console(highlight=False)
    for row in rows:
        value = json.dumps(row["value"], ensure_ascii=False) if row["value"] is not None else "unset"
        console.print(plain(f"{row['setting']} = {value}{' ' + row['unit'] if row['unit'] else ''}"), style="bold",
                      soft_wrap=True)
        console.print(plain(f"    {row['why']}"), soft_wrap=True)
