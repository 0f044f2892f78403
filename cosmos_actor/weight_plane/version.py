"""Which weights: the run, the trainer's incarnation after rewinds (epoch), and the number of updates (step)."""

from __future__ import annotations

from cosmos_actor.bus.schema import schema
from cosmos_actor.weight_plane.errors import ForeignRun, VersionNotNewer

STEP_BITS = 32


@schema("weight_version", version=1)
class Version:
    """Ordered by (epoch, step) within a run: after a rewind the step is smaller and the version is still newer."""

    run_id: str
    epoch: int
    """Counts the trainer's starts and rewinds from 0."""
    step: int
    """Updates that made these weights."""

    @property
    def ordinal(self) -> int:
        """(epoch, step) as one number, for an engine that compares numbers."""
        return self.epoch << STEP_BITS | self.step

    def require_newer_than(self, held: Version | None, who: str) -> None:
        """Raises ForeignRun or VersionNotNewer, naming `who` holds what."""
        if held is None:
            return
        if self.run_id != held.run_id:
            raise ForeignRun(f"version {self} is of run {self.run_id}, {who} belongs to run {held.run_id}")
        if self.ordinal <= held.ordinal:
            raise VersionNotNewer(f"version {self} is not newer than {held}, which {who} has")

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"
