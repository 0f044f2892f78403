"""What the roles share that hold what only a checkpoint brings back: which life of the job they belong to."""

from __future__ import annotations

from contextlib import AbstractContextManager

from cosmos_actor.actors.role import Role


class AnotherLife(Exception):
    """Asked by a life of the job that is over, or that has not restored this role yet."""


class StatefulRole(Role):
    """Guarantee: after `begin_life(n)` nothing is done that another life than n asked for, however late it arrives.

    A request may overtake another of the same sender: one whose arrays are still fetched is later than one without any.
    """

    stateful = True
    epoch = -1

    def begin_life(self, epoch: int) -> None:
        """The job goes on from a checkpoint as life `epoch`. Raises AnotherLife when a newer one has begun."""
        if epoch < self.epoch:
            raise AnotherLife(f"{self.name} belongs to life {self.epoch} of the job and can not go back to {epoch}")
        self.epoch = epoch

    def refuse_another_life(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise AnotherLife(f"asked by life {epoch} of the job, {self.name} belongs to life {self.epoch}")

    def pause(self, what: str) -> AbstractContextManager[None]:
        """Declare that a checkpoint is written or read, which takes as long as the disk does.

        The controller waits no longer than `run.deadline_s` for it, so neither does anybody else.
        """
        return self.context.busy(what, self.context.settings.run.deadline_s)
