"""Mean and variance of everything seen so far, as buffers of a module: published and saved with the weights."""

from __future__ import annotations

import numpy as np
import torch

EPSILON = 1e-8
"""Keeps what never changes finite (gymnasium's value)."""
CLIP = 10.0
"""A value that was never seen before must not drown the others (cleanRL's value)."""
FIRST_COUNT = 1e-4
"""Weight of the mean 0 and variance 1 to begin with (gymnasium's value)."""


class RunningMoments(torch.nn.Module):
    """Moments of rows of `width` numbers, merged exactly: how the rows were split over calls changes only rounding."""

    mean: torch.Tensor
    variance: torch.Tensor
    count: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(width, dtype=torch.float64))
        self.register_buffer("count", torch.full((1,), FIRST_COUNT, dtype=torch.float64))

    def include(self, rows: np.ndarray) -> None:
        """Rows [n, width] more (Chan, Golub & LeVeque 1979)."""
        new = np.asarray(rows, dtype=np.float64)
        mean, variance, count = (tensor.cpu().numpy() for tensor in (self.mean, self.variance, self.count))
        total, distance = count + len(new), new.mean(axis=0) - mean
        squares = variance * count + new.var(axis=0) * len(new) + distance**2 * count * len(new) / total
        for buffer, value in ((self.mean, mean + distance * len(new) / total), (self.variance, squares / total),
                              (self.count, total)):
            buffer.copy_(torch.from_numpy(value))

    def shift_and_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean, 1/std), float32 [width]: normalised is `(rows - mean) * (1/std)`, then clipped."""
        return self.mean.float(), (self.variance + EPSILON).rsqrt().float()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, width] float32, normalised and clipped."""
        shift, scale = self.shift_and_scale()
        return ((rows - shift) * scale).clamp(-CLIP, CLIP)
