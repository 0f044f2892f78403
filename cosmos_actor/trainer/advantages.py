"""From rewards to advantages. Pure numpy; computed where the rewards are, before any tensor is made.

Legend: G samples of one prompt, R rewards [G].
"""

from __future__ import annotations

import numpy as np


def grpo_advantages(rewards: np.ndarray, *, epsilon: float = 1e-6, normalise_std: bool = True) -> np.ndarray:
    """Advantages [G] float64 of one group (Shao et al. 2024; without std: Liu et al. 2025).

        A_i = (R_i - mean(R)) / (std(R) + epsilon),  std with n - 1

    A tied group, or a group of one, gives exactly zero. Adding a constant to R changes nothing.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.size < 2 or np.all(values == values[0]):
        return np.zeros_like(values)
    centred = values - values.mean()
    return centred / (values.std(ddof=1) + epsilon) if normalise_std else centred


def whether_informative(rewards: np.ndarray) -> bool:
    """Whether a group's rewards differ, so that it has a gradient."""
    values = np.asarray(rewards)
    return values.size > 1 and bool(np.any(values != values[0]))
