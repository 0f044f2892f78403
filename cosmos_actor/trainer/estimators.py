"""Advantage estimators over steps of episodes. Pure numpy, computed in float64.

Legend
    S  steps, fragments of episodes one after another          γ  discount          λ  lam
    r  rewards [S]          V  values [S], of what was seen before each step
    boundary [S] bool: the next row does not continue this one. The last row is always a boundary.
    bootstrap [S]: V_{t+1} where t is a boundary, unused elsewhere:
        0 after a termination, V(final observation) after a truncation, V(next observation) where the data ends
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Estimates(NamedTuple):
    """[S] float64 each."""

    advantages: np.ndarray
    returns: np.ndarray
    """What the value is to become."""


class VTrace(NamedTuple):
    """[S] float64 each."""

    advantages: np.ndarray
    """Without ρ: the ratio of a PPO loss carries it. The paper's policy gradient has `weights * advantages`."""
    returns: np.ndarray
    weights: np.ndarray
    """ρ, capped."""


def gae(rewards: np.ndarray, values: np.ndarray, bootstrap: np.ndarray, boundary: np.ndarray,
        discount: float, lam: float) -> Estimates:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16).

        δ_t = r_t + γ·V_{t+1} - V_t          A_t = δ_t + γλ·A_{t+1},  A_{t+1} = 0 at a boundary          R = A + V
    """
    r, V, following, inside = _columns(rewards, values, bootstrap, boundary)
    advantages = _sums_of_what_follows(r + discount * following - V, discount * lam * inside)
    return Estimates(advantages, advantages + V)


def vtrace(log_ratios: np.ndarray, rewards: np.ndarray, values: np.ndarray, bootstrap: np.ndarray,
           boundary: np.ndarray, discount: float, lam: float = 1.0, *, rho_bar: float = 1.0,
           c_bar: float = 1.0) -> VTrace:
    """V-trace (Espeholt et al. 2018, equation 1 and remark 2). log_ratios [S]: log π - log μ of the actions taken.

        ρ = min(ρ̄, π/μ),  c = λ·min(c̄, π/μ)          δ_t = ρ_t·(r_t + γ·V_{t+1} - V_t)
        v_t - V_t = δ_t + γ·c_t·(v_{t+1} - V_{t+1}),  the last term 0 at a boundary
        A_t = r_t + γ·v_{t+1} - V_t,  v_{t+1} = V_{t+1} at a boundary
    """
    r, V, following, inside = _columns(rewards, values, bootstrap, boundary)
    log_ratio = np.asarray(log_ratios, dtype=np.float64)
    rho, c = np.exp(np.minimum(log_ratio, np.log(rho_bar))), lam * np.exp(np.minimum(log_ratio, np.log(c_bar)))
    corrections = _sums_of_what_follows(rho * (r + discount * following - V), discount * c * inside)
    returns = corrections + V
    target = np.where(inside, np.append(returns[1:], 0.0), following)
    return VTrace(r + discount * target - V, returns, rho)


def discounted_sums(rewards: np.ndarray, boundary: np.ndarray, discount: float) -> np.ndarray:
    """What has been earned so far [S] float64: g_t = r_t + γ·g_{t-1}, from zero again after a boundary."""
    inside = ~np.asarray(boundary, dtype=bool)
    continues = np.append(False, inside[:-1])
    return _sums_of_what_follows(np.asarray(rewards, np.float64)[::-1], discount * continues[::-1])[::-1]


def _columns(rewards: np.ndarray, values: np.ndarray, bootstrap: np.ndarray, boundary: np.ndarray
             ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(r, V, V of what follows, whether the next row continues this one)."""
    r, V, after = (np.asarray(column, dtype=np.float64) for column in (rewards, values, bootstrap))
    inside = ~np.asarray(boundary, dtype=bool)
    if len(inside) and inside[-1]:
        raise ValueError("the last step is no boundary: what follows it is not known")
    return r, V, np.where(inside, np.append(V[1:], 0.0), after), inside


def _sums_of_what_follows(terms: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """x_t = terms_t + decay_t·x_{t+1}. Plain floats: a loop over array elements takes five times as long."""
    total, sums = 0.0, []
    for term, kept in zip(reversed(terms.tolist()), reversed(decay.tolist()), strict=True):
        total = term + kept * total
        sums.append(total)
    return np.array(sums[::-1], dtype=np.float64)
