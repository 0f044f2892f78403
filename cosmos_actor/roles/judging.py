"""What follows the boundaries of fragments is worth something too: one forward pass for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Seen = Mapping[str, np.ndarray]
"""Name -> [B, …], B boundaries of one fragment."""


def bootstraps(boundaries: Sequence[np.ndarray], after: Sequence[Seen], values: Callable[[Seen], np.ndarray]
               ) -> list[np.ndarray]:
    """For each fragment [S] float32: at its boundaries the value of what was seen after them, 0 elsewhere."""
    follows = values({name: np.concatenate([part[name] for part in after]) for name in after[0]})
    columns, at = [], 0
    for boundary in boundaries:
        rows = np.flatnonzero(boundary)
        column = np.zeros(len(boundary), np.float32)
        column[rows] = follows[at:at + len(rows)]
        at += len(rows)
        columns.append(column)
    return columns
