"""What a cohort of slots has seen and done, step by step, and the fragments that it becomes. Pure.

Legend: n slots of the cohort, S steps, B boundaries of one slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosmos_actor.roles.acting import Acted
from cosmos_actor.simulator_bridge.messages import Stepped


@dataclass(frozen=True)
class Row:
    """One step of n slots, or one chunk of steps."""

    observations: Mapping[str, np.ndarray]
    acted: Acted
    rewards: np.ndarray
    """[n]"""
    terminated: np.ndarray
    truncated: np.ndarray
    """[n] bool each, never both."""
    finals: Mapping[str, np.ndarray]
    """Name -> [m, …] of those that ended, in the order of the slots."""

    @classmethod
    def of(cls, observations: Mapping[str, np.ndarray], acted: Acted, stepped: Stepped,
           finals: Mapping[str, np.ndarray]) -> Row:
        terminated = stepped.terminated.astype(bool)
        rewards = stepped.rewards
        return cls(observations, acted, rewards[:, 0] if rewards.shape[1] == 1 else rewards.sum(axis=1), terminated,
                   stepped.truncated.astype(bool) & ~terminated, finals)

    @property
    def ended(self) -> np.ndarray:
        """[n] bool"""
        return self.terminated | self.truncated

    def keep(self, kept: np.ndarray) -> Row:
        """Only the slots where `kept` [n] holds."""
        ended = kept[self.ended]
        return Row(_rows(self.observations, kept),
                   self.acted.rows(kept), self.rewards[kept], self.terminated[kept], self.truncated[kept],
                   _rows(self.finals, ended))


class Cohort:
    """Rows of the same slots in the same order; a slot that fails leaves with all that it had."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def keep(self, kept: np.ndarray) -> None:
        """Forget the slots where `kept` [n] does not hold."""
        self.rows = [row.keep(kept) for row in self.rows]

    def columns(self, last: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
        """One set of a Fragment's columns a slot. `last` is what is seen after the last step: name -> [n, …]."""
        rows = self.rows
        stacked = {
            "actions": np.stack([row.acted.actions for row in rows]),
            "logprobs": np.stack([row.acted.logprobs for row in rows]).astype(np.float32),
            "values": np.stack([row.acted.values for row in rows]).astype(np.float32),
            "simulator_rewards": np.stack([row.rewards for row in rows]).astype(np.float32),
            "terminated": np.stack([row.terminated for row in rows]).astype(np.uint8),
            "truncated": np.stack([row.truncated for row in rows]).astype(np.uint8),
            "boundary": np.stack([row.ended for row in rows]).astype(np.uint8),
        }
        stacked["boundary"][-1] = 1
        versions = np.array([row.acted.version for row in rows], np.int32)
        seen = {name: np.stack([row.observations[name] for row in rows]) for name in last}
        finals = self._finals(last)
        return [{**{name: np.ascontiguousarray(column[:, slot]) for name, column in stacked.items()},
                 "versions": versions,
                 "observations": {name: np.ascontiguousarray(column[:, slot]) for name, column in seen.items()},
                 "after": finals[slot]} for slot in range(stacked["boundary"].shape[1])]

    def _finals(self, last: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """For each slot, name -> [B, …]."""
        slots = len(self.rows[0].rewards)
        found: list[dict[str, list[np.ndarray]]] = [{name: [] for name in last} for _ in range(slots)]
        for row in self.rows:
            for at, slot in enumerate(np.flatnonzero(row.ended)):
                for name in last:
                    found[slot][name].append(row.finals[name][at])
        for slot in np.flatnonzero(~self.rows[-1].ended):
            for name, column in last.items():
                found[slot][name].append(column[slot])
        return [{name: np.stack(parts) for name, parts in slot.items()} for slot in found]


def _rows(columns: Mapping[str, np.ndarray], kept: np.ndarray) -> dict[str, np.ndarray]:
    return {name: column[kept] for name, column in columns.items()}


def without(slots: Sequence[int], gone: Sequence[int]) -> np.ndarray:
    """[n] bool: which of `slots` are not among `gone`."""
    return ~np.isin(np.asarray(slots), np.asarray(gone, dtype=np.int64))
