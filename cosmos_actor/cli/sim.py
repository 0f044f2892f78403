"""`cosmos-actor sim`, for the list of commands. What runs is `simulator_bridge.cli`, which needs no typer."""

from __future__ import annotations

from typing import Annotated

import typer

from cosmos_actor.simulator_bridge.cli import main
from cosmos_actor.simulator_bridge.sim_commands import EXAMPLE as EXAMPLE

NAME = "sim"


def command(
    what: Annotated[str, typer.Argument(metavar="describe|new|test|record|wheel", help="What to do.")],
    name: Annotated[str | None, typer.Argument(
        metavar="KIND:ID|NAME", help="The simulator, such as gymnasium:CartPole-v1; for new the name of its package; "
        "for wheel nothing.")] = None,
    directory: Annotated[str | None, typer.Option("--dir", metavar="DIR", help="new: where to write it.")] = None,
    envs: Annotated[int | None, typer.Option(metavar="N", help="test: slots of a session (default 2).")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="test: most steps of an episode (default 50).")] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="record: where to write the dataset; wheel: where "
                                           "to write it.")] = None,
    episodes: Annotated[int | None, typer.Option(metavar="N", help="record: of each task (default 50).")] = None,
    task: Annotated[list[str] | None, typer.Option(metavar="NAME", help="record: which tasks (default: all).")] = None,
    noise: Annotated[float | None, typer.Option(metavar="STD", help="record: added to what is done.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="record: other seeds, other episodes.")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="record: processes at once (default 1).")] = None,
    only_success: Annotated[bool, typer.Option("--only-success", help="record: leave failures out.")] = False,
    video: Annotated[bool, typer.Option("--video", help="record: pictures as H.264.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="describe, test, record: for programs.")] = False,
) -> int:
    """Tell what a simulator can do, write a package for a new one, test whether it keeps what is asked of one, record
    what its expert does, or write the small wheel that its host needs of this."""
    options = {"--dir": directory, "--envs": envs, "--steps": steps, "--out": out, "--episodes": episodes,
               "--noise": noise, "--seed": seed, "--workers": workers}
    words = [] if name is None else [name]
    words += [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
    words += [word for one in task or () for word in ("--task", one)]
    switches = {"--only-success": only_success, "--video": video, "--json": as_json}
    return main([NAME, what, *words, *(flag for flag, given in switches.items() if given)])
