"""The objectives again, in float64 numpy, loop by loop from the papers. Shares no code with the trainer."""

from __future__ import annotations

import math

import numpy as np


def advantages(rewards: list[float], epsilon: float, with_std: bool) -> list[float]:
    n = len(rewards)
    mean = sum(rewards) / n
    variance = sum((reward - mean) ** 2 for reward in rewards) / (n - 1)
    return [(reward - mean) / (math.sqrt(variance) + epsilon) if with_std else reward - mean for reward in rewards]


def kl(x: float, r: float, estimator: str) -> float:
    if estimator.startswith("k1"):
        return x - r
    if estimator == "abs":
        return abs(x - r)
    if estimator == "k2":
        return (x - r) ** 2 / 2
    return math.exp(r - x) - (r - x) - 1


def clip_loss(x: float, o: float, a: float, low: float, high: float, dual: float) -> float:
    ratio = math.exp(x - o)
    kept = min(max(ratio, 1 - low), 1 + high)
    loss = max(-a * ratio, -a * kept)
    return min(loss, -dual * a) if dual and a < 0 else loss


def aggregate(losses: np.ndarray, mask: np.ndarray, how: str, length: int) -> float:
    """losses, mask: [B, T]."""
    rows = [[float(v) for v, m in zip(row, keep, strict=True) if m] for row, keep in zip(losses, mask, strict=True)]
    rows = [row for row in rows if row]
    if how == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if how == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if how == "seq-mean-token-sum":
        return sum(map(sum, rows)) / len(rows)
    return sum(sum(row) / length for row in rows) / len(rows)
