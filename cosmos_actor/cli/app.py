"""The typer application: every command is one file beside this one; here they are named and their errors printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer

from cosmos_actor.actors.disk import REFUSALS
from cosmos_actor.actors.errors import UserError
from cosmos_actor.cli import (
    attach,
    check,
    dead_letters,
    doctor,
    logs,
    sim,
    start,
    status,
    stop,
    up,
    version,
    weights,
    why,
)

app = typer.Typer(
    name="cosmos-actor", no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Post-training without Ray: every role is a process; trajectories and weights travel over ZeroMQ.",
    epilog="Example: cosmos-actor up grpo-arithmetic",
)
for command in (up, start, attach, sim, check, doctor, status, why, weights, dead_letters, stop, logs, version):
    app.command(command.NAME, epilog=f"Example: {command.EXAMPLE}")(command.command)

USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""click's base of usage errors; newer releases of typer bring their own copy of click."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command. A mistake of the caller, or of the bus, is one line on stderr and exit code 2."""
    try:
        outcome = app(arguments, standalone_mode=False)
    except USAGE_ERROR as error:
        return _refuse(error.format_message())
    except UserError as error:
        return _refuse(str(error))
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except Exception as error:
        if not (_from_the_bus(error) or _of_the_file_system(error)):
            raise
        return _refuse(str(error))
    return outcome if isinstance(outcome, int) else 0


def _of_the_file_system(error: Exception) -> bool:
    """Whether a person can put it right: no space, no right to write, a read-only or failing disk."""
    return isinstance(error, OSError) and error.errno in REFUSALS


def _from_the_bus(error: Exception) -> bool:
    """Whether this is a BusError. The bus is not imported for it: who raised one has done so."""
    errors = sys.modules.get("cosmos_actor.bus.errors")
    return errors is not None and isinstance(error, errors.BusError)


def _refuse(text: str) -> int:
    line = " ".join(text.split())
    sys.stderr.write(f"error: {line}\n")
    return 2
