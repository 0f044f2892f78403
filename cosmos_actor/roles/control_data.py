"""Data for control: which fragments a step asks for. Its cursor is the step, as with prompts."""

from __future__ import annotations

import numpy as np

from cosmos_actor.actors.errors import BadValue, UserError
from cosmos_actor.actors.fragment import CollectTask
from cosmos_actor.actors.role import Role, handles
from cosmos_actor.actors.seeds import seed_of
from cosmos_actor.roles.control_messages import ShownMoments, ShownRequest
from cosmos_actor.roles.messages import Tasks, TasksRequest
from cosmos_actor.roles.unit_source import UNITS_A_FRAGMENT
from cosmos_actor.simulator_bridge.contract import Description
from cosmos_actor.trainer.demonstrations import Demonstrations
from cosmos_actor.trainer.instructions import INSTRUCTION, Instructions

FRAGMENTS_A_LIFE, LIVES = 1 << 36, 1 << 15
"""Numbers of fragments in one life of the job, and of lives before numbers come again: 63 bits with
UNITS_A_FRAGMENT."""
REPLACED_A_STEP = 1 << 12
"""Fragments in the place of others at most."""


class ControlDataRole(Role):
    """Tasks are pure functions of (run seed, step, split): nothing is held that could be lost."""

    name = "data"

    def setup(self) -> None:
        self.demonstrations: Demonstrations | None = None

    @handles(TasksRequest)
    def tasks(self, request: TasksRequest) -> Tasks:
        prefix = "f" if request.split == "train" else "r"
        return Tasks([self._task(f"{prefix}{request.step:06d}-{place:04d}", request, place)
                      for place in range(request.prompts)])

    @handles(ShownRequest)
    def shown(self, request: ShownRequest) -> ShownMoments:
        """Raises UserError for demonstrations that are not there, can not be read, or are of another simulator."""
        settings = self.context.settings
        demonstrations = self._demonstrations(request.description)
        generator = np.random.default_rng(seed_of(f"{settings.run.seed}/demonstrations/{request.step}"))
        vla = settings.control.network.kind == "vla"
        horizon = settings.control.flow.chunk if vla else 1
        found = demonstrations.chunks(horizon).sample(generator, request.count)
        told = {INSTRUCTION: self.told[found.tasks]} if vla else {}
        return ShownMoments({**found.observations, **told}, found.actions, found.mask.astype(np.uint8))

    def _demonstrations(self, description: Description) -> Demonstrations:
        if self.demonstrations is None:
            folder = self.context.settings.control.cloning.demonstrations
            with self.context.busy(f"the demonstrations of {folder}", self.context.settings.run.deadline_s):
                try:
                    opened = Demonstrations.open(folder)
                except UserError as error:
                    raise BadValue(str(error), setting="control.cloning.demonstrations") from error
                refuse_another_simulator(opened, description)
                self.demonstrations = opened
            self.told = Instructions(opened.description, kind="vla").told(opened.tasks)[INSTRUCTION]
        return self.demonstrations

    def _task(self, group_id: str, request: TasksRequest, place: int) -> CollectTask:
        settings = self.context.settings
        return CollectTask(
            group_id=group_id, attempt=request.attempt, steps=settings.sim.fragment_steps,
            first_unit=self._first_unit(request, place),
            seed=seed_of(f"{settings.run.seed}/{request.split}/{request.step}/{place}"))

    @staticmethod
    def _first_unit(request: TasksRequest, place: int) -> int:
        """Grows with the life of the job and the step: what a life that was rolled back has begun is not begun anew."""
        fragment = request.step * request.prompts + place
        if request.split != "train":  # however many are asked for: apart from all that steps ask for themselves
            fragment = FRAGMENTS_A_LIFE // 2 + request.step * REPLACED_A_STEP + place
        return (request.attempt % LIVES * FRAGMENTS_A_LIFE + fragment) * UNITS_A_FRAGMENT


def refuse_another_simulator(demonstrations: Demonstrations, description: Description) -> None:
    """Raises BadValue unless the demonstrations are of what the run's simulators show and do."""
    shown = demonstrations.description
    for name in ("observations", "action", "embodiment"):
        if getattr(shown, name) != getattr(description, name):
            raise BadValue(f"the demonstrations are of {shown.simulator}, whose `{name}` is {getattr(shown, name)}; "
                           f"that of {description.simulator} is {getattr(description, name)}",
                           setting="control.cloning.demonstrations")
