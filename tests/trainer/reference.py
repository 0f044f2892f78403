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


def ratios(x: np.ndarray, o: np.ndarray, mask: np.ndarray, by: str) -> np.ndarray:
    """π_train / π_rollout of each token, or of the sequence that it is in, [B, T]; nan where there is no token."""
    result = np.full(x.shape, np.nan)
    for b in range(x.shape[0]):
        learned = [t for t in range(x.shape[1]) if mask[b, t]]
        for t in learned:
            over = learned if by == "sequence" else [t]
            distance = math.fsum(x[b, s] - o[b, s] for s in over)
            result[b, t] = math.exp(min(max(distance, -20.0), 20.0))
    return result


def corrected(ratio: float, rule: str, cap: float, floor: float) -> float:
    if rule == "truncate":
        return cap if ratio > cap else ratio
    if rule == "mask":
        return 0.0 if ratio > cap else ratio
    return ratio if floor <= ratio <= cap else 0.0


def distances(x: np.ndarray, o: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    by_token = [value for value in ratios(x, o, mask, "token").ravel() if not math.isnan(value)]
    rows = ratios(x, o, mask, "sequence")
    by_sequence = [row[~np.isnan(row)][0] for row in rows if not np.isnan(row).all()]
    gaps = [x[b, t] - o[b, t] for b in range(x.shape[0]) for t in range(x.shape[1]) if mask[b, t]]

    def share(values: list[float]) -> float:
        return sum(values) ** 2 / (len(values) * sum(value * value for value in values))

    def chi2(values: list[float]) -> float:
        return sum(value * value - 1 for value in values) / len(values)

    return {
        "k1": sum(-gap for gap in gaps) / len(gaps),
        "k3": sum(min(math.exp(min(gap, 20.0)) - min(gap, 20.0) - 1, 10.0) for gap in gaps) / len(gaps),
        "ess": share(by_token), "ess_sequence": share(by_sequence),
        "chi2": chi2(by_token), "chi2_sequence": chi2(by_sequence),
        "max": max(abs(gap) for gap in gaps),
    }
