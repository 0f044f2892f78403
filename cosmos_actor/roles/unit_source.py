"""Which work units there are: a source is a function of (description, settings, seed) to `unit(number)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cosmos_actor.actors.errors import UnknownName
from cosmos_actor.actors.loading import load_object
from cosmos_actor.actors.seeds import seed_of
from cosmos_actor.simulator_bridge.contract import BY_SEED, Description, TaskSpec, WorkUnit

Source = Callable[[int], WorkUnit]


def load_source(settings: Any, description: Description) -> Source:
    """The source that `sim.source` names, over the tasks that `sim.tasks` names (all when empty).

    Raises UnknownName for a task that the simulator has not.
    """
    known = {task.name: task for task in description.tasks}
    for name in settings.sim.tasks:
        if name not in known:
            raise UnknownName(f"{description.simulator} has no task `{name}`; it has {', '.join(known)}",
                              setting="sim.tasks")
    tasks = [known[name] for name in settings.sim.tasks] or description.tasks
    make: Any = in_turn if settings.sim.source == "in_turn" else load_object(settings.sim.source, setting="sim.source")
    return make(tasks, settings.run.seed)  # type: ignore[no-any-return]


def in_turn(tasks: list[TaskSpec], seed: int) -> Source:
    """Unit k is of task k mod n; its initial state is the next of that task's set, or its own seed."""

    def unit(number: int) -> WorkUnit:
        task = tasks[number % len(tasks)]
        turn = number // len(tasks)
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
