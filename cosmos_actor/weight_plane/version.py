"""Which weights: the run, the trainer's incarnation after rewinds (epoch), and the number of updates (step)."""

from __future__ import annotations

import numpy as np

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

    def require_run(self, run_id: str) -> None:
        """Raises ForeignRun unless this is a version of run `run_id`."""
        if self.run_id != run_id:
            raise ForeignRun(f"version {self} is of run {self.run_id}, this is run {run_id}")

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


def steps_of(ordinals: np.ndarray) -> np.ndarray:
    """`Version.step` of each `Version.ordinal`: [N] int64 -> [N] int32."""
    return (ordinals & ((1 << STEP_BITS) - 1)).astype(np.int32)


class NewestTaken:
    """The newest version that one reader of a run has taken: only newer ones follow it, or itself while in doubt."""

    def __init__(self, run_id: str, who: str) -> None:
        """`who` is named in what `check` raises."""
        self.newest: Version | None = None
        self._run_id, self._who = run_id, who
        self._doubted = False

    def check(self, version: Version) -> None:
        """Raises ForeignRun or VersionNotNewer for a version that is not to be taken."""
        version.require_run(self._run_id)
        if not (self._doubted and version == self.newest):
            version.require_newer_than(self.newest, self._who)

    def take(self, version: Version) -> None:
        """This one is the newest now, and in no doubt."""
        self.newest, self._doubted = version, False

    def doubt(self, version: Version) -> bool:
        """Allow `version` to be taken once more, if it is the newest; whether it is."""
        self._doubted = self._doubted or version == self.newest
        return version == self.newest
