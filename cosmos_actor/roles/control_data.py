"""Data for control: which fragments a step asks for. Its cursor is the step, as with prompts."""

from __future__ import annotations

from cosmos_actor.actors.fragment import CollectTask
from cosmos_actor.actors.role import Role, handles
from cosmos_actor.actors.seeds import seed_of
from cosmos_actor.roles.messages import Tasks, TasksRequest

UNITS_A_FRAGMENT, FRAGMENTS_A_LIFE, LIVES = 1 << 12, 1 << 36, 1 << 15
"""Numbers of units that one fragment begins on average at most, of fragments in one life of the job, and of lives
before numbers come again: together 63 bits."""


class ControlDataRole(Role):
    """Tasks are pure functions of (run seed, step, split): nothing is held that could be lost."""

    name = "data"

    @handles(TasksRequest)
    def tasks(self, request: TasksRequest) -> Tasks:
        prefix = "f" if request.split == "train" else "r"
        return Tasks([self._task(f"{prefix}{request.step:06d}-{place:04d}", request, place)
                      for place in range(request.prompts)])

    def _task(self, group_id: str, request: TasksRequest, place: int) -> CollectTask:
        settings = self.context.settings
        return CollectTask(
            group_id=group_id, attempt=request.attempt, steps=settings.sim.fragment_steps,
            first_unit=self._first_unit(request, place),
            seed=seed_of(f"{settings.run.seed}/{request.split}/{request.step}/{place}"))

    @staticmethod
    def _first_unit(request: TasksRequest, place: int) -> int:
        """Grows with the life of the job and the step: what a life that was rolled back has begun is not begun anew."""
        fragment = request.attempt % LIVES * FRAGMENTS_A_LIFE + request.step * request.prompts + place
        return fragment * UNITS_A_FRAGMENT
