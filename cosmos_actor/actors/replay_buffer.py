"""The store of experience between rollout and training.

Invariant: a group (group id, attempt) that was put is in the buffer, was sampled once, or was dropped with a reason
that the reply named; it is never two of these. What is sampled depends on what was put, not on its order of arrival.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosmos_actor.actors.experience import Group, GroupBatch, in_order, owned
from cosmos_actor.actors.trajectory import MalformedGroup
from cosmos_actor.bus.schema import decode, encode

REMEMBERED_GROUPS = 16_384
"""Groups remembered after they left. With none, a put that is delivered again after its group was sampled would train
it twice; with all, a long run's checkpoint would grow without end. The ledger refuses what is older."""

GroupKey = tuple[str, int]
"""(group id, attempt)"""


class BufferFull(Exception):
    """The groups do not fit into the byte budget; none of them was taken."""

    def __init__(self, used_bytes: int, wanted_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"the replay buffer holds {used_bytes} of {budget_bytes} bytes and can not take {wanted_bytes} more: raise"
            " `replay_buffer.budget_bytes` or keep fewer groups in flight"
        )


class NotEnoughGroups(Exception):
    """Fewer groups are there than were asked for; none of them was taken. `dropped` is what was stale."""

    def __init__(self, wanted: int, present: int, version: int, dropped: Sequence[Dropped]) -> None:
        super().__init__(f"{wanted} groups were asked for at version {version}, the replay buffer has {present}")
        self.wanted, self.present, self.dropped = wanted, present, tuple(dropped)


@dataclass(frozen=True, slots=True)
class Dropped:
    """One group that left untrained; `keys` are its rows in the ledger."""

    group_id: str
    keys: tuple[tuple[str, int], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Put:
    """What became of the groups of one put."""

    accepted: tuple[GroupKey, ...]
    duplicates: tuple[GroupKey, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Groups in the order of their ids, and what had grown too stale to be among them."""

    groups: tuple[Group, ...]
    dropped: tuple[Dropped, ...]


class ReplayBuffer:
    """Groups in private memory, first in first out by group id; each is sampled at most once."""

    def __init__(self, *, budget_bytes: int, max_staleness: int | None = None) -> None:
        """`budget_bytes` bounds the arrays and texts of all groups; `max_staleness` is in versions, None: no bound."""
        self._budget_bytes = budget_bytes
        self._max_staleness = max_staleness
        self._groups: dict[GroupKey, Group] = {}
        self._bytes = 0
        self._seen: dict[GroupKey, None] = {}
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, groups: Iterable[Group]) -> Put:
        """Copy all new groups in, or none and raise BufferFull or MalformedGroup.

        Whatever was put before is a duplicate, also when it has left since.
        """
        fresh: dict[GroupKey, Group] = {}
        duplicates: list[GroupKey] = []
        for group in groups:
            key = (group.group_id, group.attempt)
            if key in self._seen or key in fresh:
                duplicates.append(key)
                continue
            _check(group)
            fresh[key] = group
        self._take(fresh)
        self._counts["duplicates"] += len(duplicates)
        return Put(tuple(fresh), tuple(duplicates))

    def sample(self, groups: int, version: int) -> Sample:
        """Remove and return the first `groups` groups that may be trained when the weights are at `version`.

        Before that drops what is more than `max_staleness` versions older. Raises NotEnoughGroups, which names what
        was dropped, and then leaves the rest in place.
        """
        dropped = self.drop_stale(version)
        if len(self._groups) < groups:
            raise NotEnoughGroups(groups, len(self._groups), version, dropped)
        chosen = in_order(self._groups.values())[:groups]
        for group in chosen:
            self._remove(group)
        self._counts["sampled"] += len(chosen)
        return Sample(tuple(chosen), tuple(dropped))

    def drop_stale(self, version: int) -> list[Dropped]:
        """Remove what is more than `max_staleness` versions older than `version`."""
        limit = self._max_staleness
        if limit is None:
            return []
        stale = [group for group in in_order(self._groups.values()) if group.staleness(version) > limit]
        return [self._drop(group, f"stale: more than {limit} versions old") for group in stale]

    def keys(self) -> list[tuple[str, int]]:
        """The ledger rows of everything that is here, in the order of the groups."""
        return [key for group in in_order(self._groups.values()) for key in group.keys]

    def state(self) -> dict[str, np.ndarray]:
        """All of it as arrays: load_state of them gives a buffer that answers every call as this one would."""
        head, frames = encode(GroupBatch(list(self._groups.values())))
        parts = [np.frombuffer(frame, np.uint8) for frame in frames]
        document = {"seen": list(self._seen), "counts": dict(self._counts), "dropped": dict(self._dropped)}
        return {
            "groups": np.frombuffer(head, np.uint8),
            "frames": np.concatenate(parts) if parts else np.zeros(0, np.uint8),
            "frame_bytes": np.array([part.size for part in parts], np.int64),
            "document": np.frombuffer(json.dumps(document).encode(), np.uint8),
        }

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Become the buffer that `state` is of, with this one's limits. Raises SchemaError for other fields."""
        frames = np.split(state["frames"], np.cumsum(state["frame_bytes"])[:-1]) if state["frame_bytes"].size else []
        batch = decode(state["groups"].tobytes(), [frame.tobytes() for frame in frames])
        document = json.loads(state["document"].tobytes())
        self._groups = {(group.group_id, group.attempt): group for group in batch.groups}
        self._bytes = sum(group.nbytes for group in batch.groups)
        self._seen = {(group_id, attempt): None for group_id, attempt in document["seen"]}
        self._counts = Counter(document["counts"])
        self._dropped = Counter(document["dropped"])

    def statistics(self) -> dict[str, Any]:
        """Sizes now, and counts since the start: groups, except `dropped`, which is trajectories by reason."""
        groups = self._groups.values()
        return {
            "groups": len(groups),
            "trajectories": sum(group.samples for group in groups),
            "tokens": sum(group.token_count for group in groups),
            "bytes": self._bytes,
            "budget_bytes": self._budget_bytes,
            "oldest_version": min((group.version_dispatch for group in groups), default=None),
            "accepted": self._counts["accepted"],
            "sampled": self._counts["sampled"],
            "duplicates": self._counts["duplicates"],
            "dropped": dict(self._dropped),
        }

    def _take(self, fresh: Mapping[GroupKey, Group]) -> None:
        wanted = sum(group.nbytes for group in fresh.values())
        if self._bytes + wanted > self._budget_bytes:
            raise BufferFull(self._bytes, wanted, self._budget_bytes)
        self._groups.update({key: owned(group) for key, group in fresh.items()})
        self._bytes += wanted
        self._counts["accepted"] += len(fresh)
        self._remember(fresh)

    def _remember(self, keys: Iterable[GroupKey]) -> None:
        self._seen.update(dict.fromkeys(keys))
        gone = (key for key in self._seen if key not in self._groups)
        for key in [key for key, _ in zip(gone, range(len(self._seen) - REMEMBERED_GROUPS), strict=False)]:
            del self._seen[key]

    def _drop(self, group: Group, reason: str) -> Dropped:
        self._remove(group)
        self._dropped[reason] += group.samples
        return Dropped(group.group_id, tuple(group.keys), reason)

    def _remove(self, group: Group) -> None:
        del self._groups[group.group_id, group.attempt]
        self._bytes -= group.nbytes


def _check(group: Group) -> None:
    group.check()
    if not group.samples:
        raise MalformedGroup(group.group_id, "a group without samples can not be trained; drop it")
