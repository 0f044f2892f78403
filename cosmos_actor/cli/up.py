"""`cosmos-actor up`: run a recipe to its end, with live progress and a report."""

from __future__ import annotations

import secrets
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cosmos_actor.actors.disk import refusal
from cosmos_actor.actors.errors import UserError
from cosmos_actor.cli.arguments import SetOption

if TYPE_CHECKING:
    from cosmos_actor.actors.run_directory import RunDirectory
    from cosmos_actor.cli.progress import Progress
    from cosmos_actor.recipes.settings import RunSettings

NAME, EXAMPLE = "up", "cosmos-actor up grpo-arithmetic --set run.seed=1"
INTERNAL_LOG = "up.log"


def command(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe or the path of a TOML file; may be left "
                                               "out with --resume --run-dir.")] = "",
    settings: SetOption = None,
    run_dir: Annotated[str, typer.Option("--run-dir", help="Where the run is written; left out, runs/NAME-N.")] = "",
    resume: Annotated[bool, typer.Option(
        "--resume", help="Go on with a run from its latest checkpoint, under the settings it was made with: the run of "
        "--run-dir, else the newest of this recipe.")] = False,
    inproc: Annotated[bool, typer.Option(
        "--inproc", help="Every role in this process, where breakpoint() works.")] = False,
    listen: Annotated[str, typer.Option(
        metavar="tcp://HOST:PORT", help="Where actors of other shells and hosts can join; the same as "
        "--set bus.host=HOST --set bus.port=PORT.")] = "",
    faults: Annotated[str, typer.Option(
        metavar="FAULTS", help="A bad network on purpose, such as drop=0.01,dup=0.01,delay=50ms,partition=rollout:5s; "
        "the same as --set bus.faults=FAULTS.")] = "",
) -> int:
    """Run a recipe: start its actors, show their progress, write report.html whatever becomes of it."""
    from cosmos_actor.cli.preflight import preflight
    flags = [*(settings or ()), *_listen_flags(listen), *([f'bus.faults="{faults}"'] if faults else [])]
    resolved, root = _to_resume(recipe, flags, run_dir) if resume else _fresh(recipe, flags, run_dir)
    inproc = inproc or resolved.run.grouping == "single"
    for finding in preflight(resolved, root, resume=resume, inproc=inproc):
        if not finding.ok:
            raise UserError(finding.line)
    if resume:
        _tell_what_is_lost(resolved, root)
    with _open(resolved, root, resume=resume) as directory:
        return _run(resolved, directory, inproc=inproc, listen=listen or None)


def _listen_flags(listen: str) -> list[str]:
    from cosmos_actor.cli.start import valid_address
    if not listen:
        return []
    host, _, port = valid_address(listen, "--listen", first_port=0).removeprefix("tcp://").rpartition(":")
    return [f'bus.host="{host}"', f"bus.port={port}"]


def _fresh(recipe: str, flags: list[str], run_dir: str) -> tuple[RunSettings, Path | None]:
    from cosmos_actor.recipes.resolve import recipe_names, resolve
    if not recipe:
        raise UserError(f"name a recipe: {', '.join(recipe_names())}, or the path of a TOML file")
    resolved = resolve(recipe, flags)
    directory = run_dir or resolved.run.run_dir
    return resolved, Path(directory) if directory else None


def _to_resume(recipe: str, flags: list[str], run_dir: str) -> tuple[RunSettings, Path]:
    """The settings that the run was made with, `--set` on top: the recipe only says which run is meant."""
    from cosmos_actor.cli.runs import find_run, newest_of
    from cosmos_actor.recipes.resolve import resolve
    from cosmos_actor.recipes.resolved import load_resolved
    if not recipe and not run_dir:
        raise UserError("--resume needs a recipe or --run-dir, to know which run is meant")
    name = resolve(recipe).run.name if recipe else ""
    paths = find_run(run_dir) if run_dir else newest_of(name)
    resolved = load_resolved(paths.configuration, flags)
    if not resolved.run.name:  # every run has one: what else the file has lost can not be known
        raise UserError(f"{paths.configuration} is not whole, it names no run; put it back, or start a new run")
    if name and resolved.run.name != name:
        raise UserError(f"{paths.root} is a run of `{resolved.run.name}`, not of `{name}`", setting="--run-dir")
    return resolved, paths.root


def _tell_what_is_lost(settings: RunSettings, root: Path | None) -> None:
    from cosmos_actor.actors.run_directory import RunPaths
    from cosmos_actor.cli.resume import resumable
    assert root is not None
    for line in resumable(settings, RunPaths(root)):
        typer.echo(line, err=True)


def _open(settings: RunSettings, root: Path | None, *, resume: bool) -> RunDirectory:
    from cosmos_actor.actors.run_directory import RunDirectory
    from cosmos_actor.cli.runs import claim_next, point_latest
    from cosmos_actor.recipes.resolved import resolved_text
    from cosmos_actor.recipes.settings import digest, resumable_names
    root = claim_next(settings.run.name) if root is None else root
    text = resolved_text(settings)
    if resume:
        directory = RunDirectory.open_for_resume(root, digest(settings), resolved=text, resumable=resumable_names())
    else:
        run_id = f"{root.name}-{secrets.token_hex(4)}"
        directory = RunDirectory.create(root, digest(settings), run_id=run_id, resolved=text)
    point_latest(directory.root)
    return directory


def _run(settings: RunSettings, directory: RunDirectory, *, inproc: bool, listen: str | None) -> int:
    """Launch under a progress display; the report is written however that ends."""
    from cosmos_actor.cli.progress import Progress
    from cosmos_actor.cli.up_log import warnings_into
    progress = Progress(directory.root, title=settings.run.name, live=False if inproc else None,
                        last_step=settings.policy.sft_steps + settings.run.steps)
    typer.echo(f"run directory {_short(directory.root)}", err=True)
    exit_code, reason = 1, "interrupted"
    try:
        with progress, warnings_into(directory.logs / INTERNAL_LOG, progress.notice):
            exit_code, reason = _launch(settings, directory, progress, inproc=inproc, listen=listen)
            exit_code, reason = _check_ledger(directory, exit_code, reason)
    finally:
        report = _report(directory, reason, exit_code)
    typer.echo(reason if exit_code == 0 else f"error: {reason}", err=exit_code != 0)
    typer.echo(report, err=True)
    return exit_code


def _launch(settings: RunSettings, directory: RunDirectory, progress: Progress, *, inproc: bool,
            listen: str | None) -> tuple[int, str]:
    from cosmos_actor.bus.errors import BusError
    try:
        from cosmos_actor.job.launch import launch
        outcome = launch(settings, directory=directory, inproc=inproc, listen=listen, observer=progress)
        return outcome.exit_code, outcome.reason
    except (UserError, BusError) as error:
        return 2, str(error)
    except Exception as error:  # the outermost call of a job: its traceback goes to a file, its line to the person
        refused = refusal(error) if isinstance(error, OSError) else None
        return (1, _internal(error, directory)) if refused is None else (2, str(refused))


def _internal(error: Exception, directory: RunDirectory) -> str:
    """A fault of the program in one line; where the traceback is."""
    log = directory.logs / INTERNAL_LOG
    try:
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        return f"{type(error).__name__}: {error} (traceback in {_short(log)})"
    except OSError:
        return f"{type(error).__name__}: {error}"


def _check_ledger(directory: RunDirectory, exit_code: int, reason: str) -> tuple[int, str]:
    """A run whose ledger does not balance has lost or doubled work: it has failed, whatever it says itself."""
    from cosmos_actor.cli.report import read_balance
    from cosmos_actor.cli.status import ledger_line
    balance = read_balance(directory)
    if balance is None:
        return exit_code, reason
    typer.echo(ledger_line(balance), err=True)
    return (exit_code, reason) if balance["balanced"] or exit_code else (1, ledger_line(balance))


def _report(directory: RunDirectory, reason: str, exit_code: int) -> str:
    """A line about the report. One that can not be written must not hide how the run ended."""
    from cosmos_actor.cli.report import write_report
    try:
        return f"report {_short(write_report(directory.root, outcome=reason, ok=exit_code == 0))}"
    except OSError as error:
        return f"no report: {error.filename or directory.report}: {error.strerror}"


def _short(path: Path) -> str:
    """Relative to where the person is, when it is below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
