"""What experience is to the roles that pass it on: a group of texts, or a fragment of a simulator's episodes.

Both have: group_id, attempt, keys, samples, token_count, nbytes, version_dispatch, version_min, version_max, staleness,
with_field, check.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from cosmos_actor.actors.fragment import CollectTask, Fragment
from cosmos_actor.actors.trajectory import GenerateTask, TrajectoryGroup
from cosmos_actor.bus.schema import schema

Group = TrajectoryGroup | Fragment
Task = GenerateTask | CollectTask
"""What asks for one of them."""


@schema("group_batch", version=2)
class GroupBatch:
    """Groups in the order of their ids."""

    groups: list[TrajectoryGroup | Fragment]


def owned(group: Group) -> Group:
    """The group in memory of its own, copied where it is not: views over received frames end with their message."""
    changes = {name: copied for name, value in vars(group).items() if (copied := _copied(value)) is not value}
    return replace(group, **changes) if changes else group


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.base is not None:
        return value.copy()
    if isinstance(value, dict) and any(isinstance(item, np.ndarray) and item.base is not None
                                       for item in value.values()):
        return {name: _copied(item) for name, item in value.items()}
    return value


def in_order(groups: Iterable[Group]) -> list[Group]:
    """By (group id, attempt), the one order in which groups are batched, whatever order they arrived in."""
    return sorted(groups, key=order_of)


def order_of(group: Group) -> tuple[int, str, int]:
    """Sort key. Shorter ids come first, so that g1000000 follows g999999."""
    return (len(group.group_id), group.group_id, group.attempt)
