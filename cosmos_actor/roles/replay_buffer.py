"""Replay buffer: holds scored groups between generation and training, and nothing else."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path

import numpy as np

from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.replay_buffer import Dropped, NotEnoughGroups, ReplayBuffer
from cosmos_actor.actors.role import Role, handles
from cosmos_actor.actors.trajectory import owned
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

FILE = "replay_buffer.npz"


class ReplayBufferRole(Role):
    """Stateful: what it holds between two checkpoints is lost with it, and the job goes back to the last checkpoint."""

    name = "replay_buffer"
    stateful = True

    def setup(self) -> None:
        self.buffer = self._empty()

    def _empty(self) -> ReplayBuffer:
        settings = self.context.settings
        return ReplayBuffer(budget_bytes=settings.replay_buffer.budget_bytes, max_staleness=settings.run.max_staleness)

    @handles(PutRequest)
    def put(self, request: PutRequest) -> PutReply:
        """The arrays are copied: their producer may go, and its memory with it, as soon as this is answered."""
        put = self.buffer.put([owned(group) for group in request.groups])
        return PutReply(stored=len(put.accepted), duplicates=len(put.duplicates))

    @handles(SampleRequest)
    def sample(self, request: SampleRequest) -> Sample:
        try:
            sample = self.buffer.sample(request.groups, request.version)
        except NotEnoughGroups as short:
            return Sample([], by_reason(short.dropped), present=short.present)
        return Sample(list(sample.groups), by_reason(sample.dropped), present=len(sample.groups))

    @handles(SaveRequest)
    def save(self, request: SaveRequest) -> Saved:
        state = self.buffer.state()
        np.savez(Path(request.directory) / FILE, **state)
        return Saved("replay_buffer", request.step, _digest(state))

    @handles(RestoreRequest)
    def restore(self, request: RestoreRequest) -> Restored:
        self.buffer = self._empty()
        if request.directory is not None:
            path = Path(request.directory) / FILE
            try:
                with np.load(path, allow_pickle=False) as file:
                    self.buffer.load_state(dict(file))
            except (OSError, ValueError, KeyError) as error:
                raise UserError(f"checkpoint file {path} can not be read: {error}", setting="run.run_dir") from error
        return Restored("replay_buffer", request.step)


def by_reason(dropped: tuple[Dropped, ...]) -> dict[str, list[str]]:
    """Reason -> "trajectory id@attempt" of everything that was dropped."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for item in dropped:
        reasons[item.reason] += [f"{name}@{attempt}" for name, attempt in item.keys]
    return dict(reasons)


def _digest(state: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(state[name]).data)
    return digest.hexdigest()
