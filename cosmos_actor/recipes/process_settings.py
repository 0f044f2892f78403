"""What the sections of roles share: whose processes they are, and kinds of values. Importable without torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, PositiveInt

from cosmos_actor.actors.settings import Settings, setting

NonNegativeInt = Annotated[int, Field(ge=0)]
Device = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
PlainValue = bool | int | float | str


class ProcessSettings(Settings):
    """What every role may say about the processes that play it."""

    python: str | None = setting(
        None, "path; a role with its own dependencies (a simulator, an engine) names its own interpreter, "
        "unset = the one that runs `up`", resumable=True)
    threads: PositiveInt = setting(
        1, "compute threads; fixed, because their number changes the order of sums and so the last bits of a loss",
        unit="threads")
    env: dict[str, str] = setting(
        {}, "environment added for these processes, for libraries that are steered only that way", resumable=True)


class ComputeSettings(ProcessSettings):
    """What a role that runs a model may say on top."""

    device: str = setting("auto", "cpu, cuda, or auto for a GPU where there is one", pattern="^(auto|cpu|cuda)$")
    devices: tuple[Device, ...] = setting(
        (), "GPUs of this host for this role, as CUDA_VISIBLE_DEVICES names them; empty = given out by run.placement",
        strict=False)
