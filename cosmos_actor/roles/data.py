"""Data: the prompts of each step. Its cursor is the step, so asking again for a step gives the same prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cosmos_actor.actors.role import Role, handles
from cosmos_actor.actors.seeds import seed_of
from cosmos_actor.actors.trajectory import GenerateTask
from cosmos_actor.roles.messages import Demonstration, Demonstrations, DemonstrationsRequest, Tasks, TasksRequest
from cosmos_actor.roles.task import load_task
from cosmos_actor.roles.tokenizer import load_tokenizer

FIRST_DEMONSTRATION = 1 << 40
"""Demonstrations are numbered apart from the problems, so that SFT shows none of the prompts that GRPO draws first."""

FIRST_REPLACEMENT = 1 << 41
REPLACEMENTS_A_STEP = 1 << 16


class DataRole(Role):
    """Tasks and demonstrations are pure functions of (run seed, split, step): nothing is held that could be lost."""

    name = "data"

    def setup(self) -> None:
        settings = self.context.settings
        self.task = load_task(settings, settings.run.seed)
        self.tokenizer = load_tokenizer(settings.policy.model)

    @handles(TasksRequest)
    def tasks(self, request: TasksRequest) -> Tasks:
        if request.split == "replacement":
            return self._replacements(request)
        first = 0 if request.split == "held_out" else (request.step - 1) * request.prompts
        prefix = "g" if request.split == "train" else f"{request.split}-"
        return Tasks([
            self._task(f"{prefix}{request.step:06d}-{place:04d}", request, first + place)
            for place in range(request.prompts)
        ])

    def _replacements(self, request: TasksRequest) -> Tasks:
        """Training problems that no step draws by itself, named so that they come behind their step's own."""
        first = FIRST_REPLACEMENT + (request.step - 1) * REPLACEMENTS_A_STEP
        request = replace(request, split="train")
        return Tasks([
            self._task(f"g{request.step:06d}-r{place:03d}", request, first + place)
            for place in range(request.prompts)
        ])

    @handles(DemonstrationsRequest)
    def demonstrations(self, request: DemonstrationsRequest) -> Demonstrations:
        first = FIRST_DEMONSTRATION + (request.step - 1) * request.count
        return Demonstrations([self._demonstration(first + place) for place in range(request.count)])

    def _task(self, group_id: str, request: TasksRequest, index: int) -> GenerateTask:
        prompt, payload = self.task.problem(request.split, index)
        return GenerateTask(
            group_id=group_id, attempt=request.attempt, task=payload,
            prompt=np.asarray(self.tokenizer.encode_prompt(prompt), dtype=np.int32), samples=request.samples,
            seed=self._seed(request.split, request.step, index))

    def _demonstration(self, index: int) -> Demonstration:
        prompt, payload = self.task.problem("train", index)
        return Demonstration(
            prompt=np.asarray(self.tokenizer.encode_prompt(prompt), dtype=np.int32),
            answer=np.asarray(self.tokenizer.encode_answer(self.task.answer(payload)), dtype=np.int32))

    def _seed(self, split: str, step: int, index: int) -> int:
        """63 bits that differ for each (run seed, split, step, index), the same in every placement."""
        return seed_of(f"{self.context.settings.run.seed}/{split}/{step}/{index}")
