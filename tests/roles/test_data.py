"""The prompts of a step are a function of step and seed; replacements are others, and the same each time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cosmos_actor.actors.context import Context, SystemClock
from cosmos_actor.actors.trajectory import GenerateTask
from cosmos_actor.actors.worker import InlineWorker
from cosmos_actor.bus import Identity
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.roles.data import DataRole
from cosmos_actor.roles.messages import TasksRequest


@pytest.fixture
def role() -> DataRole:
    settings = resolve("grpo-arithmetic", ["data.arithmetic.largest=99"])
    context = Context(Identity("run", "data", "data-0", "1"), settings, seed=0, clock=SystemClock(),
                      worker=InlineWorker())
    made = DataRole(context)
    asyncio.run(context.compute("setup", made.setup))
    return made


def ask(role: DataRole, step: int, prompts: int, split: str = "train") -> list[GenerateTask]:
    return role.tasks(TasksRequest(step=step, prompts=prompts, samples=4, split=split, attempt=2)).tasks


def prompts(tasks: list[GenerateTask]) -> list[tuple[int, ...]]:
    return [tuple(task.prompt.tolist()) for task in tasks]


def test_replacements_are_training_problems_of_their_own_and_always_the_same(role: DataRole) -> None:
    own, replacements = ask(role, 3, 16), ask(role, 3, 16, "replacement")
    assert [task.group_id for task in replacements[:2]] == ["g000003-r000", "g000003-r001"]
    assert not {task.seed for task in own} & {task.seed for task in replacements}
    assert prompts(ask(role, 3, 2, "replacement")) == prompts(replacements[:2])
    assert prompts(ask(role, 4, 16, "replacement")) != prompts(replacements)
    assert all(task.attempt == 2 and task.samples == 4 for task in replacements)
    assert not set(prompts(replacements)) & set(prompts(ask(role, 1, 200, "held_out")))


def test_a_step_gives_the_same_prompts_each_time(role: DataRole) -> None:
    assert all(np.array_equal(one.prompt, other.prompt) and one.seed == other.seed
               for one, other in zip(ask(role, 3, 8), ask(role, 3, 8), strict=True))
