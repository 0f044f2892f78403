"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

RunArgument = Annotated[str, typer.Argument(
    metavar="RUN", help="A run directory, its name below runs/, or latest.", show_default=True)]
SetOption = Annotated[list[str] | None, typer.Option(
    "--set", metavar="NAME=VALUE", help="Change a setting, for example policy.optimizer.learning_rate=5e-4. "
    "Repeatable. All settings: check RECIPE --explain.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print data as JSON on stdout.")]
