"""Which work units there are: `sim.source` names a function of (tasks, seed of the run) to `unit(number)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cosmos_actor.actors.errors import BadValue, UnknownName
from cosmos_actor.actors.seeds import seed_of
from cosmos_actor.roles.plugins import SOURCES
from cosmos_actor.simulator_bridge.contract import BY_SEED, Description, TaskSpec, WorkUnit

Source = Callable[[int], WorkUnit]
UNITS_A_FRAGMENT = 1 << 12
"""Units that a fragment begins on average at most: from step to step the number goes up to the next multiple of this
times the step's fragments."""


def make_source(make: Callable[..., Any], settings: Any, description: Description) -> Source:
    """What `make`, the source that `sim.source` names, gives for the tasks of `sim.tasks` (all when empty).

    Raises UnknownName for a task that the simulator has not, BadValue when `make` raises or gives nothing to call.
    """
    known = {task.name: task for task in description.tasks}
    for name in settings.sim.tasks:
        if name not in known:
            raise UnknownName(f"{description.simulator} has no task `{name}`; it has {', '.join(known)}",
                              setting="sim.tasks")
    tasks = [known[name] for name in settings.sim.tasks] or description.tasks
    source = SOURCES.call(settings.sim.source, make, tasks, settings.run.seed)
    if not callable(source):
        raise BadValue(f"the source {settings.sim.source} gave {type(source).__name__}, not a function of a number to "
                       "a WorkUnit", setting=SOURCES.setting)
    return source  # type: ignore[no-any-return]


def in_turn(tasks: list[TaskSpec], seed: int) -> Source:
    """One task after the other; a unit's initial state is the next of its task's set, or its own seed.

    Where a stretch of UNITS_A_FRAGMENT numbers begins is drawn: steps begin at multiples of it, so that with eight
    tasks and four episodes a step the same four would have all the turns.
    """

    def unit(number: int) -> WorkUnit:
        place = number + seed_of(f"{seed}/turn/{number // UNITS_A_FRAGMENT}", bits=31)
        task = tasks[place % len(tasks)]
        turn = place // len(tasks)
        return WorkUnit(unit_id=f"u{number}", task=task.name, seed=unit_seed(seed, number),
                        initial_state=turn % task.initial_states if task.initial_states else BY_SEED)

    return unit


def trials(description: Description, names: Sequence[str], count: int, seed: int) -> list[WorkUnit]:
    """An evaluation: `count` trials of each task, the same every time. Trial k begins in initial state k mod the size
    of the task's set, or with a seed of its own."""
    tasks = [task for task in description.tasks if not names or task.name in names]
    return [
        WorkUnit(unit_id=f"{task.name}/{trial}", task=task.name, seed=unit_seed(seed, trial, f"trial of {task.name}"),
                 initial_state=trial % task.initial_states if task.initial_states else BY_SEED)
        for task in tasks for trial in range(count)]


def unit_seed(seed: int, number: int, kind: str = "unit") -> int:
    """31 bits, which every simulator takes, that differ for each (run seed, kind, number)."""
    return seed_of(f"{seed}/{kind}/{number}", bits=31)
