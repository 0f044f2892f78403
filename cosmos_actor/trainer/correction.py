"""What engine and trainer compute differently of the same weights: how far apart they are, and weights against it.

The engine sampled the tokens, with other kernels and perhaps another dtype than the trainer scores them with. Pure
numpy in float64 over a whole batch, so that neither micro-batches nor ranks change a number.

Legend, all [B, T]
    x  log-prob that the trainer gives a token      o  that the engine gave it when it sampled it
    m  mask: 1 where a token was sampled            d = x - o,  w = exp(clamp(d, ±20))
    a sequence has  D = Σ_t m·d,  W = exp(clamp(D, ±20))
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MAX_LOG_WEIGHT_NATS = 20.0
# exp of more would be all there is to see in a mean; so far away nothing is compared any more.
MAX_KL_NATS = 10.0
# One outlier token must not outweigh a whole batch.


class Correction(NamedTuple):
    """[B, T] each."""

    weights: np.ndarray
    """float64, what each token's policy loss is multiplied by; 1 where there is no token."""
    cut: np.ndarray
    """bool, whether the rule changed the weight."""


def mismatch(x: np.ndarray, o: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """How far the trainer (p) is from the engine (q), from tokens that the engine sampled; all zeros and ones if not.

        k1 = mean(-d),  k3 = mean(exp(d) - d - 1)        estimates of KL(q ‖ p) (Schulman 2020)
        ess = (Σw)² / (n·Σw²)                            effective sample size as a share of n (Kong 1992)
        chi2 = mean(w²) - 1                              estimate of χ²(p ‖ q)
        max = max |d|

    Over tokens; ess_sequence and chi2_sequence over sequences, with W. k3 of a token is clamped to ±10. A batch without
    tokens gives nothing.
    """
    d, tokens, sequences = _differences(x, o, mask)
    if not tokens.size:
        return {}
    exponent = tokens.clip(-MAX_LOG_WEIGHT_NATS, MAX_LOG_WEIGHT_NATS)
    k3 = (np.expm1(exponent) - exponent).clip(-MAX_KL_NATS, MAX_KL_NATS)
    w, W = _weights(tokens), _weights(sequences)
    return {
        "mismatch/k1": float(-tokens.mean()),
        "mismatch/k3": float(k3.mean()),
        "mismatch/ess": effective_share(w),
        "mismatch/ess_sequence": effective_share(W),
        "mismatch/chi2": float(np.square(w).mean() - 1.0),
        "mismatch/chi2_sequence": float(np.square(W).mean() - 1.0),
        "mismatch/max": float(np.abs(d).max()),
    }


def newest_mismatch(x: np.ndarray, o: np.ndarray, mask: np.ndarray, versions: np.ndarray) -> dict[str, float]:
    """max |d| of the tokens alone that the newest weights [B, T] of the batch sampled; and of those of them, if there
    are any, before which they sampled everything else of the answer, too.

    Where those are the trainer's own, nothing is left in it but what the engine computes differently. In the former
    there is also what older weights left in the engine's cache, if it goes on with that.
    """
    there = np.asarray(mask) > 0
    if not there.any():
        return {}
    newest = there & (versions == versions[there].max())
    found = {"mismatch/newest_max": float(np.abs(_differences(x, o, newest)[1]).max())}
    whole = newest & np.logical_and.accumulate(newest | ~there, axis=1)
    if whole.any():
        found["mismatch/newest_whole_max"] = float(np.abs(_differences(x, o, whole)[1]).max())
    return found


def effective_share(weights: np.ndarray) -> float:
    """(Σw)² / (n·Σw²): 1 for equal weights, 1/n when one of n has all."""
    return float(np.square(weights.sum()) / (weights.size * np.square(weights).sum()))


def correction(
    x: np.ndarray, o: np.ndarray, mask: np.ndarray, *, level: str, rule: str, cap: float, floor: float = 0.0
) -> Correction:
    """Importance weights of the rollout against the trainer, by token (w) or by sequence (W for each of its tokens).

        truncate   min(w, cap)                      Yao et al. 2025 (truncated importance sampling), cap C = 2
        mask       w where w <= cap, else 0         Liu et al. 2025 (masked importance sampling)
        two_sided  w where floor <= w <= cap, else 0    Ling Team 2025 (IcePop), there 0.5 and 5 by token

    What is masked still counts in the loss's denominators. Raises ValueError for another level or rule.
    """
    d, _, _ = _differences(x, o, mask)
    there = np.asarray(mask) > 0
    if level == "sequence":
        d = np.broadcast_to(d.sum(axis=1, keepdims=True), d.shape)
    elif level != "token":
        raise ValueError(f"no level of correction is called {level!r}")
    raw = _weights(d)
    if rule == "truncate":
        weights = np.minimum(raw, cap)
    elif rule == "mask":
        weights = np.where(raw <= cap, raw, 0.0)
    elif rule == "two_sided":
        weights = np.where((floor <= raw) & (raw <= cap), raw, 0.0)
    else:
        raise ValueError(f"no rule of correction is called {rule!r}")
    return Correction(np.where(there, weights, 1.0), there & (weights != raw))


def correction_metrics(made: Correction, mask: np.ndarray) -> dict[str, float]:
    """How many tokens were cut, as a count and as a share, and the mean weight of all."""
    tokens = max(int((np.asarray(mask) > 0).sum()), 1)
    return {
        "correction/cut_tokens": float(made.cut.sum()),
        "correction/cut": float(made.cut.sum() / tokens),
        "correction/weight": float(made.weights[np.asarray(mask) > 0].sum() / tokens),
    }


def _differences(x: np.ndarray, o: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(d [B, T], d of the tokens [N], D of the sequences that have a token), float64; d is 0 where no token is."""
    there = np.asarray(mask) > 0
    d = np.where(there, np.asarray(x, np.float64) - np.asarray(o, np.float64), 0.0)
    return d, d[there], d.sum(axis=1)[there.any(axis=1)]


def _weights(log_weights: np.ndarray) -> np.ndarray:
    return np.exp(log_weights.clip(-MAX_LOG_WEIGHT_NATS, MAX_LOG_WEIGHT_NATS))
