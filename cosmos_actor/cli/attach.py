"""`cosmos-actor attach`, for the list of commands. What runs is `simulator_bridge.cli`, which needs no typer."""

from __future__ import annotations

from typing import Annotated

import typer

from cosmos_actor.simulator_bridge.cli import EXAMPLE as EXAMPLE
from cosmos_actor.simulator_bridge.cli import main

NAME = "attach"


def command(
    simulator: Annotated[str, typer.Argument(
        metavar="KIND:ID", help="What to attach, such as gymnasium:CartPole-v1; options can follow as ?NAME=VALUE.")],
    connect: Annotated[str, typer.Option(metavar="tcp://HOST:PORT", help="The actor that drives simulators.")],
    key: Annotated[str, typer.Option(
        metavar="FILE", help="The key file of the role simulator; - reads it from standard input.")],
    envs: Annotated[int, typer.Option(metavar="N", help="Environments in this process.")] = 1,
    name: Annotated[str, typer.Option(help="Its name in the run; left out, simulator-HOST-PID.")] = "",
    rejoin: Annotated[float, typer.Option(
        metavar="SECONDS", min=0, help="How long to look for a driver that can not be reached; 0: end then.")] = 300.0,
    option: Annotated[list[str] | None, typer.Option(
        metavar="NAME=VALUE", help="An option of the simulator; can be given several times.")] = None,
    max_memory_mb: Annotated[int, typer.Option(
        metavar="MB", min=0, help="Leave with exit code 3 when the process holds more; 0: never.")] = 0,
) -> int:
    """Attach a simulator to a running job, from the simulator's own environment. Ctrl-C lets it leave."""
    options = [word for given in option or [] for word in ("--option", given)]
    return main([NAME, simulator, "--connect", connect, "--key", key, "--envs", str(envs), "--name", name,
                 "--rejoin", str(rejoin), "--max-memory-mb", str(max_memory_mb), *options])
