"""Experience from simulators: consecutive steps of one slot, and the order that asks for them.

Legend
    S  steps                     B  rows after which the next row is not the continuation
    A  elements of an action

A fragment may hold the end of one episode and the beginning of the next; `boundary` says where. It travels along the
roles as a group of texts does, and each adds its own column.
"""

from __future__ import annotations

from dataclasses import field

import numpy as np

from cosmos_actor.actors.trajectory import Experience, MalformedGroup
from cosmos_actor.bus.schema import Array, Json, array, schema

COLUMNS = ("actions", "logprobs", "simulator_rewards", "boundary", "terminated", "truncated", "versions", "rewards",
           "reference_logprobs", "values", "bootstrap")


@schema("fragment", version=1)
class Fragment(Experience):
    """S steps of one policy version after the other in one slot. One trajectory of the ledger."""

    group_id: str
    attempt: int
    task: Json
    """{"simulator": KIND:ID, "actor": who ran it, "episodes": those that ended in it, "env_steps": actions that were
    executed, more than S where they come in chunks}"""
    version_dispatch: int
    observations: dict[str, Array] = array("any")
    """Name -> [S, …]: what each action was chosen by."""
    actions: Array = array("any")
    """[S, …]"""
    logprobs: Array = array("float32", "S")
    simulator_rewards: Array = array("float32", "S")
    boundary: Array = array("uint8", "S")
    """1: an episode ended with this step, or the fragment did."""
    terminated: Array = array("uint8", "S")
    """1: it ended by the task's own rules, and nothing follows."""
    truncated: Array = array("uint8", "S")
    """1: an episode was cut off; a boundary that is neither is only the end of the fragment."""
    after: dict[str, Array] = array("any")
    """Name -> [B, …]: what was seen after each boundary, in order."""
    versions: Array = array("int32", "S")
    """The weights that chose each action."""
    rewards: Array | None = array("float32", "S", optional=True)
    reference_logprobs: Array | None = array("float32", "S", optional=True)
    values: Array | None = array("float32", "S", optional=True)
    """Of `observations`, under the critic of the version that acted."""
    bootstrap: Array | None = array("float32", "S", optional=True)
    """At boundaries the value of `after`, 0 elsewhere; termination is for the learner to apply."""
    version_min: int | None = None
    version_max: int | None = None
    written_by: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.version_min is None and isinstance(self.versions, np.ndarray) and self.versions.size:
            object.__setattr__(self, "version_min", int(self.versions.min()))
            object.__setattr__(self, "version_max", int(self.versions.max()))

    samples = 1
    """Trajectories of the ledger that it is."""
    appendable = dict.fromkeys(("rewards", "reference_logprobs", "values", "bootstrap"), "token_count")

    @property
    def token_count(self) -> int:
        """S, under the name that all experience has for its length."""
        return int(self.logprobs.shape[0])

    @property
    def trajectory_ids(self) -> tuple[str, ...]:
        return (f"{self.group_id}/0",)

    @property
    def nbytes(self) -> int:
        arrays = [getattr(self, name) for name in COLUMNS]
        arrays += [*self.observations.values(), *self.after.values()]
        return sum(int(column.nbytes) for column in arrays if column is not None)

    def check(self) -> None:
        """Raises MalformedGroup unless every column has its length, and the last row is a boundary."""
        steps, ends = self.token_count, int(np.count_nonzero(self.boundary))
        columns = {name: getattr(self, name) for name in COLUMNS}
        sized = {**columns, **{f"observations.{name}": column for name, column in self.observations.items()}}
        for name, column in sized.items():
            if column is not None and column.shape[:1] != (steps,):
                raise MalformedGroup(self.group_id, f"`{name}` has {steps} rows, not {list(column.shape)}")
        for name, column in self.after.items():
            if column.shape[:1] != (ends,):
                raise MalformedGroup(self.group_id, f"`after.{name}` has {ends} rows, not {list(column.shape)}")
        if not steps or not self.boundary[-1]:
            raise MalformedGroup(self.group_id, "the last step of a fragment is a boundary")
        if set(self.after) != set(self.observations):
            raise MalformedGroup(self.group_id, "`after` has the names of `observations`")


@schema("collect_task", version=1)
class CollectTask:
    """One fragment to collect."""

    group_id: str
    attempt: int
    steps: int
    """S"""
    first_unit: int
    """Episodes that begin in a request are units of the source from the smallest `first_unit` of its tasks on."""
    seed: int
    """Of the noise that its actions are drawn with."""
    samples: int = 1

    @property
    def trajectory_ids(self) -> tuple[str, ...]:
        return (f"{self.group_id}/0",)

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Its row in the ledger."""
        return [(name, self.attempt) for name in self.trajectory_ids]
