"""Objectives as pure functions of tensors.

Legend, all [B, T]
    x  log-prob under the policy being trained      o  under the behaviour (old) policy
    r  under the reference policy                   A  advantage
    m  mask: 1 where a token was sampled by the policy
    w  weight of each token in the loss, zero where m is zero
and of a critic, of any shape
    V  value                                        R  return, what the value is to become
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MAX_LOG_RATIO_NATS = 20.0
# exp of more overflows float32 sums; a ratio this far away carries no information.
MAX_KL_NATS = 10.0
# One outlier token must not outweigh a whole batch.


def log_ratio(x: Tensor, o: Tensor) -> Tensor:
    """clamp(x - o, ±20)."""
    return (x - o).clamp(-MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS)


class PolicyLoss(NamedTuple):
    """Per token [B, T]: the loss, the ratio and whether the clip decided the loss."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def ppo_clip(x: Tensor, o: Tensor, A: Tensor, *, low: float, high: float, dual: float = 0.0) -> PolicyLoss:
    """Clipped surrogate (Schulman et al. 2017, equation 7), asymmetric (Yu et al. 2025), dual (Ye et al. 2020).

        ρ = exp(clamp(x - o, ±20)),  loss = max(-A·ρ, -A·clip(ρ, 1 - low, 1 + high))
        with dual = c > 0, where A < 0:  min(loss, -c·A)
    """
    ratio = log_ratio(x, o).exp()
    unclipped, clipped = -A * ratio, -A * ratio.clamp(1.0 - low, 1.0 + high)
    loss = torch.maximum(unclipped, clipped)
    if dual > 0:
        loss = torch.where(A < 0, torch.minimum(loss, -dual * A), loss)
    return PolicyLoss(loss, ratio.detach(), (clipped > unclipped).detach())


def kl_estimate(x: Tensor, r: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) from tokens the policy sampled (Schulman 2020).

        k1 = x - r    abs = |x - r|    k2 = ½(x - r)²    k3 = exp(r - x) - (r - x) - 1
        k1+, k3+: the value of k1, k3 with the gradient of k2

    The exponent is clamped to ±20, k3 to ±10. Raises ValueError for another name.
    """
    difference = x - r
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        exponent = (-difference).clamp(-MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS)
        return (exponent.exp() - exponent - 1.0).clamp(-MAX_KL_NATS, MAX_KL_NATS)
    if estimator in ("k1+", "k3+"):
        value, slope = kl_estimate(x, r, estimator[:-1]), kl_estimate(x, r, "k2")
        return (value - slope).detach() + slope
    raise ValueError(f"no KL estimator is called {estimator!r}: k1, abs, k2, k3, k1+, k3+")


def value_loss(V: Tensor, V_old: Tensor, R: Tensor, *, clip: float = 0.0) -> Tensor:
    """Squared error of a critic; with clip = ε > 0 the value gains nothing by moving further than that (PPO's code).

        ½·max((V - R)², (V_old + clip(V - V_old, ±ε) - R)²)
    """
    loss = (V - R).square()
    if clip > 0:
        loss = torch.maximum(loss, (V_old + (V - V_old).clamp(-clip, clip) - R).square())
    return 0.5 * loss


def token_weights(mask: np.ndarray, aggregation: str, *, length: int = 1024) -> np.ndarray:
    """The weights w [B, T] float64 with which token losses sum to the loss: loss = Σ w·l.

        token-mean               w = m / Σm                  seq-mean-token-mean      w = m / (n · Σ_t m)
        seq-mean-token-sum       w = m / n                   seq-mean-token-sum-norm  w = m / (n · length)

    n counts sequences with a token. Computed over the whole batch, so that micro-batches and ranks, which sum their
    parts, give the same loss. An empty batch weighs nothing. Raises ValueError for another name.
    """
    m = np.asarray(mask, dtype=np.float64)
    per_sequence = m.sum(axis=1, keepdims=True)
    sequences = max(int((per_sequence > 0).sum()), 1)
    if aggregation == "token-mean":
        return m / max(m.sum(), 1.0)
    if aggregation == "seq-mean-token-mean":
        return m / (sequences * np.maximum(per_sequence, 1.0))
    if aggregation == "seq-mean-token-sum":
        return m / sequences
    if aggregation == "seq-mean-token-sum-norm":
        return m / (sequences * length)
    raise ValueError(f"no aggregation is called {aggregation!r}")


def cross_entropy(x: Tensor) -> Tensor:
    """Supervised loss of each token [B, T]: -x."""
    return -x
