"""Replay buffer: holds scored groups between generation and training, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.experience import owned
from cosmos_actor.actors.replay_buffer import Dropped, NotEnoughGroups, ReplayBuffer
from cosmos_actor.actors.role import handles
from cosmos_actor.actors.run_directory import ANOTHER_CHECKPOINT
from cosmos_actor.roles.array_file import read_arrays, write_arrays
from cosmos_actor.roles.messages import (
    PutReply,
    PutRequest,
    Restored,
    RestoreRequest,
    Sample,
    SampleRequest,
    Saved,
    SaveRequest,
)
from cosmos_actor.roles.stateful import StatefulRole

FILE = "replay_buffer.npz"


class ReplayBufferRole(StatefulRole):
    """What it holds is of one life of the job: a late put of an earlier one is refused, not trained."""

    name = "replay_buffer"

    def setup(self) -> None:
        self.buffer = self._empty()

    def _empty(self) -> ReplayBuffer:
        settings = self.context.settings
        return ReplayBuffer(budget_bytes=settings.replay_buffer.budget_bytes, max_staleness=settings.run.max_staleness)

    @handles(PutRequest)
    def put(self, request: PutRequest) -> PutReply:
        """The arrays are copied: their producer may go, and its memory with it, as soon as this is answered."""
        self.refuse_another_life(request.epoch)
        put = self.buffer.put([owned(group) for group in request.groups])
        return PutReply(stored=len(put.accepted), duplicates=len(put.duplicates))

    @handles(SampleRequest)
    def sample(self, request: SampleRequest) -> Sample:
        self.refuse_another_life(request.epoch)
        try:
            sample = self.buffer.sample(request.groups, request.version)
        except NotEnoughGroups as short:
            return Sample([], by_reason(short.dropped), present=short.present)
        return Sample(list(sample.groups), by_reason(sample.dropped), present=len(sample.groups))

    @handles(SaveRequest)
    def save(self, request: SaveRequest) -> Saved:
        self.refuse_another_life(request.epoch)
        with self.pause(f"checkpoint {request.step}"):
            write_arrays(Path(request.directory) / FILE, self.buffer.state())
        return Saved("replay_buffer", request.step)

    @handles(RestoreRequest)
    def restore(self, request: RestoreRequest) -> Restored:
        self.begin_life(request.epoch)
        self.buffer = self._empty()
        if request.directory is not None:
            path = Path(request.directory) / FILE
            try:
                self.buffer.load_state(read_arrays(path, ANOTHER_CHECKPOINT))
            except (ValueError, KeyError) as error:
                raise UserError(f"{path} is no replay buffer: {error}; {ANOTHER_CHECKPOINT}",
                                setting="run.run_dir") from error
        return Restored("replay_buffer", request.step)


def by_reason(dropped: tuple[Dropped, ...]) -> dict[str, list[str]]:
    """Reason -> "trajectory id@attempt" of everything that was dropped."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for item in dropped:
        reasons[item.reason] += [f"{name}@{attempt}" for name, attempt in item.keys]
    return dict(reasons)
