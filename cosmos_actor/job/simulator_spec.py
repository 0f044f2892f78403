"""How the supervisor starts a simulator: on this host, or through a launcher on another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cosmos_actor import death
from cosmos_actor.actors.child import CHILD_ENVIRONMENT
from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.placement import DEVICES_VARIABLE, PlacedActor
from cosmos_actor.recipes.settings import RunSettings
from cosmos_actor.simulator_bridge import far_end
from cosmos_actor.simulator_bridge.attach import STDIN
from cosmos_actor.simulator_bridge.messages import SIMULATOR
from cosmos_actor.simulator_bridge.plugins import as_text


def simulator_spec(settings: RunSettings, placed: PlacedActor, door: str, key: Path) -> ChildSpec:
    """It is ready when it has attached at `door`; a hang of it ends by its driver's deadlines and its own.

    Through a launcher it hears its words, its variables and its key by standard input, and leaves at the end of that.
    """
    sim, limits = settings.sim, settings.supervisor
    through = sim.launcher(placed.index)
    options = [part for name, value in sim.options.items() for part in ("--option", f"{name}={as_text(value)}")]
    if sim.max_memory_mb:
        options += ["--max-memory-mb", str(sim.max_memory_mb)]
    words = ("-m", "cosmos_actor.cli", "attach", sim.kind, "--connect", door, "--key", STDIN if through else str(key),
             "--envs", str(sim.envs), "--name", placed.actor, *options)
    env = {name: value for name, value in placed.env.items() if name != DEVICES_VARIABLE}  # it may render on any
    spec = ChildSpec(actor=placed.actor, role=SIMULATOR, command=(placed.python, *words), env={**env, **sim.env},
                     after=(), alone=True, start_s=limits.start_s, shutdown_s=limits.shutdown_s)
    if not through:
        return spec
    return replace(spec, command=far_end.command(through, placed.python), env={},
                   stdin=partial(_letter, words, {**CHILD_ENVIRONMENT, **spec.env}, key))


def _letter(words: Sequence[str], env: Mapping[str, str], key: Path, incarnation: str) -> bytes:
    """What the far end is told of one life: the incarnation by which its driver names it is of no other."""
    return far_end.Letter(list(words), {**env, death.INCARNATION: incarnation}, key.read_text()).line()
