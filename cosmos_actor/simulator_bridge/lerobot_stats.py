"""Statistics of a dataset's columns as `meta/stats.json` has them: min, max, mean, std, count and five quantiles.

Exact: of numbers from all of them, of pictures from counts of their 256 values, a channel at a time, in [0, 1].
Legend: T steps, C channels.
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
VALUES = 256


def of_numbers(values: np.ndarray) -> Dict[str, Any]:
    """Of a column [T] or [T, …], for each of its numbers."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    found: Dict[str, Any] = {
        "min": flat.min(0).tolist(), "max": flat.max(0).tolist(), "mean": flat.mean(0).tolist(),
        "std": flat.std(0).tolist(), "count": [len(flat)]}
    quantiles = np.quantile(flat, list(QUANTILES.values()), axis=0)
    return {**found, **{name: row.tolist() for name, row in zip(QUANTILES, quantiles)}}


class PictureStatistics(NamedTuple):
    """Of pictures [T, H, W, C]; those of two lots are their sum."""

    counts: np.ndarray
    """[C, 256]: how many pixels have this value"""
    pictures: int

    @classmethod
    def of(cls, frames: np.ndarray) -> PictureStatistics:
        counts = np.stack([np.bincount(frames[..., channel].reshape(-1), minlength=VALUES)
                           for channel in range(frames.shape[-1])])
        return cls(counts, len(frames))

    def __add__(self, other: Any) -> PictureStatistics:
        return PictureStatistics(self.counts + other.counts, self.pictures + other.pictures)

    def plain(self) -> Dict[str, Any]:
        values = np.arange(VALUES) / (VALUES - 1)
        pixels = self.counts.sum(1)
        mean = self.counts @ values / pixels
        variance = self.counts @ values**2 / pixels - mean**2
        there = self.counts > 0
        found = {"min": values[there.argmax(1)], "max": values[VALUES - 1 - there[:, ::-1].argmax(1)],
                 "mean": mean, "std": np.sqrt(np.maximum(variance, 0.0))}
        shares = self.counts.cumsum(1) / pixels[:, None]
        for name, share in QUANTILES.items():
            found[name] = values[(shares >= share).argmax(1)]
        return {**{name: column.reshape(-1, 1, 1).tolist() for name, column in found.items()},
                "count": [self.pictures]}
