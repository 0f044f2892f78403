"""`cosmos-actor sim`, for the list of commands. What runs is `simulator_bridge.cli`, which needs no typer."""

from __future__ import annotations

from typing import Annotated

import typer

from cosmos_actor.simulator_bridge.cli import main
from cosmos_actor.simulator_bridge.sim_commands import EXAMPLE as EXAMPLE

NAME = "sim"


def command(
    what: Annotated[str, typer.Argument(metavar="describe|new|test", help="What to do.")],
    name: Annotated[str, typer.Argument(
        metavar="KIND:ID|NAME", help="The simulator, such as gymnasium:CartPole-v1; for new the name of its package.")],
    directory: Annotated[str | None, typer.Option("--dir", metavar="DIR", help="new: where to write it.")] = None,
    envs: Annotated[int | None, typer.Option(metavar="N", help="test: slots of a session (default 2).")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="test: most steps of an episode (default 50).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="describe, test: for programs.")] = False,
) -> int:
    """Tell what a simulator can do, write a package for a new one, or test whether it keeps what is asked of one."""
    options = {"--dir": directory, "--envs": envs, "--steps": steps}
    words = [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
    return main([NAME, what, name, *words, *(["--json"] if as_json else [])])
