"""The unit of experience: the sampled answers to one prompt, columnar and ragged, and the order that asks for them.

Legend
    P  tokens of the prompt
    G  samples of the group; each is one trajectory, the row that the ledger keeps
    N  tokens of all samples, one after the other: N = sum(lengths)

A group travels along the roles and each adds its own fields (reward, reference log-probs, values). Nothing is padded
and nothing is re-tokenised: training sees the very token ids that were sampled.
"""

from __future__ import annotations

from dataclasses import field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from cosmos_actor.bus.codec import ArrayReference
from cosmos_actor.bus.schema import Array, Json, array, schema

PER_SAMPLE = ("lengths", "finished", "rewards")
PER_TOKEN = ("tokens", "logprobs", "versions", "reference_logprobs", "values")


class TrajectoryError(ValueError):
    """A group of trajectories that contradicts itself or its history."""


class MalformedGroup(TrajectoryError):
    """The columns of a group do not fit together."""

    def __init__(self, group_id: str, what: str) -> None:
        super().__init__(f"trajectory group {group_id}: {what}")
        self.group_id = group_id


class FieldAlreadyWritten(TrajectoryError):
    """A second role wrote a field that has its writer."""

    def __init__(self, group_id: str, name: str, first: str, second: str) -> None:
        super().__init__(f"trajectory group {group_id}: {second} may not write `{name}`, {first} wrote it")
        self.group_id, self.name, self.first, self.second = group_id, name, first, second


def trajectory_ids(group_id: str, samples: int) -> tuple[str, ...]:
    """The ids of the `samples` trajectories that a dispatched group stands for: ``g000012/0``, ``g000012/1``, …"""
    return tuple([f"{group_id}/{index}" for index in range(samples)])


class Experience:
    """What a group of texts and a fragment of episodes have in common: rows in the ledger, an age, and columns that
    roles add, each by one writer.

    A subclass has group_id, attempt, trajectory_ids, version_dispatch, version_min, written_by.
    """

    appendable: Any = {}
    """Column that a role adds -> the property that is its length."""

    @property
    def keys(self: Any) -> list[tuple[str, int]]:
        """(trajectory id, attempt) of each sample: its rows in the ledger."""
        return [(name, self.attempt) for name in self.trajectory_ids]

    def staleness(self: Any, version: int) -> int:
        """Versions between the oldest weights that this is of and `version`, where it is trained.

        Counted from the dispatch, or from the oldest token where an engine was further behind than the dispatcher knew.
        """
        oldest = self.version_dispatch if self.version_min is None else min(self.version_dispatch, self.version_min)
        return int(version - oldest)

    def with_field(self: Any, name: str, value: Any, writer: str) -> Any:
        """This, with a column of `appendable` added, as float32. A reference to an array on the bulk plane stays one.

        Raises FieldAlreadyWritten when the field has its writer, MalformedGroup for another field or a wrong shape.
        """
        if name not in self.appendable:
            raise MalformedGroup(self.group_id, f"`{name}` is no field that a role adds: {sorted(self.appendable)}")
        if name in self.written_by or getattr(self, name) is not None:
            raise FieldAlreadyWritten(self.group_id, name, self.written_by.get(name, "its producer"), writer)
        column = value if isinstance(value, ArrayReference) else np.ascontiguousarray(value, dtype=np.float32)
        expected = (getattr(self, self.appendable[name]),)
        if tuple(column.shape) != expected:
            raise MalformedGroup(self.group_id, f"`{name}` is {list(expected)}, not {list(column.shape)}")
        return replace(self, **{name: column, "written_by": {**self.written_by, name: writer}})


@schema("trajectory_group", version=1)
class TrajectoryGroup(Experience):
    """One prompt's samples. A trajectory keeps its id through every `select`; every field has exactly one writer."""

    group_id: str
    attempt: int
    """Counts dispatches of this group from 0; a ledger row is (trajectory id, attempt)."""
    task: Json
    """What the reward needs to judge an answer; small."""
    prompt: Array = array("int32", "P")
    lengths: Array = array("int32", "G")
    """Tokens of each sample, the stop token included."""
    tokens: Array = array("int32", "N")
    logprobs: Array = array("float32", "N")
    """Under the behaviour policy, at the sampling temperature; nats."""
    versions: Array = array("int32", "N")
    """The weight version (step) that produced each token."""
    version_dispatch: int
    """The weight version when the group was asked for: staleness counts from here, not from its completion."""
    finished: Array = array("uint8", "G")
    """1: ended by a stop token; 0: cut at the longest allowed length."""
    texts: list[str]
    rewards: Array | None = array("float32", "G", optional=True)
    reference_logprobs: Array | None = array("float32", "N", optional=True)
    values: Array | None = array("float32", "N", optional=True)
    indices: Array | None = array("int32", "G", optional=True)
    """Place of each sample in the dispatched group; absent: 0..G-1."""
    version_min: int | None = None
    """Smallest of `versions`, filled in when absent, so that staleness is known where the tokens are not."""
    version_max: int | None = None
    written_by: dict[str, str] = field(default_factory=dict)
    """Appended field -> actor."""

    appendable = {"rewards": "samples", "reference_logprobs": "token_count", "values": "token_count"}

    def __post_init__(self) -> None:
        if self.version_min is None and isinstance(self.versions, np.ndarray):
            present = self.versions.size > 0
            object.__setattr__(self, "version_min", int(self.versions.min()) if present else self.version_dispatch)
            object.__setattr__(self, "version_max", int(self.versions.max()) if present else self.version_dispatch)

    @property
    def samples(self) -> int:
        """G."""
        return int(self.lengths.shape[0])

    @property
    def token_count(self) -> int:
        """N."""
        return int(self.tokens.shape[0])

    @property
    def trajectory_ids(self) -> tuple[str, ...]:
        """One id a sample, the same before and after `select`."""
        if self.indices is None:
            return trajectory_ids(self.group_id, self.samples)
        return tuple([f"{self.group_id}/{index}" for index in self.indices.tolist()])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays and texts."""
        arrays = [self.prompt] + [getattr(self, name) for name in PER_SAMPLE + PER_TOKEN + ("indices",)]
        return sum(int(a.nbytes) for a in arrays if a is not None) + sum(len(text) for text in self.texts)

    def slices(self) -> list[slice]:
        """For each sample the place of its tokens in every [N] array."""
        return [slice(start, end) for start, end in pairwise([0, *np.cumsum(self.lengths).tolist()])]

    def split(self, name: str) -> list[np.ndarray]:
        """The [N] array `name` as G views, one a sample."""
        values = getattr(self, name)
        return [values[part] for part in self.slices()]

    def select(self, mask: Any) -> TrajectoryGroup:
        """Only the samples where `mask` ([G] bool) holds, with the ids they had; MalformedGroup for a wrong mask."""
        keep = np.asarray(mask)
        if keep.shape != (self.samples,) or keep.dtype != np.bool_:
            raise MalformedGroup(self.group_id, f"a mask is [{self.samples}] bool, not {list(keep.shape)} {keep.dtype}")
        tokens = np.repeat(keep, self.lengths)
        parts: dict[str, Any] = {name: _masked(getattr(self, name), keep) for name in PER_SAMPLE}
        parts.update({name: _masked(getattr(self, name), tokens) for name in PER_TOKEN})
        parts["indices"] = self._indices()[keep]
        parts["texts"] = [text for text, kept in zip(self.texts, keep.tolist(), strict=True) if kept]
        return replace(self, version_min=None, version_max=None, **parts)

    def check(self) -> None:
        """Raises MalformedGroup unless every column has its length and the versions are in order."""
        tokens = int(self.lengths.sum())
        for names, expected in ((PER_SAMPLE + ("indices",), self.samples), (PER_TOKEN, tokens)):
            for name in names:
                column = getattr(self, name)
                if column is not None and column.shape != (expected,):
                    raise MalformedGroup(self.group_id, f"`{name}` is [{expected}], not {list(column.shape)}")
        if len(self.texts) != self.samples:
            raise MalformedGroup(self.group_id, f"{len(self.texts)} texts for {self.samples} samples")
        if self.samples and int(self.lengths.min()) < 0:
            raise MalformedGroup(self.group_id, "a sample has a negative length")

    def _indices(self) -> np.ndarray:
        return np.arange(self.samples, dtype=np.int32) if self.indices is None else self.indices


def _masked(column: np.ndarray | None, mask: np.ndarray) -> np.ndarray | None:
    return None if column is None else column[mask]


@schema("generate_task", version=1)
class GenerateTask:
    """One prompt to sample: the answer is a function of these fields and the weights alone."""

    group_id: str
    attempt: int
    task: Json
    prompt: Array = array("int32", "P")
    samples: int
    """G"""
    seed: int
    """Sample i draws its noise from (seed, i, position), whoever its neighbours in the batch are."""

    @property
    def trajectory_ids(self) -> tuple[str, ...]:
        """The ids of the trajectories that this task will become."""
        return trajectory_ids(self.group_id, self.samples)

    @property
    def keys(self) -> list[tuple[str, int]]:
        """(trajectory id, attempt) of each: its rows in the ledger."""
        return [(name, self.attempt) for name in self.trajectory_ids]
