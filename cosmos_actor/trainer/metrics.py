"""Sums over micro-batches and ranks that become the metrics of one update.

Legend: w weights of tokens in the loss, m mask, both [B, T].
"""

from __future__ import annotations

from typing import Any

import torch


class Meter:
    """Collects without waiting for the device; `totals` waits once. Means are over all learned tokens of the batch."""

    def __init__(self, tokens: int) -> None:
        self._tokens = max(tokens, 1)
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def begin(self, weights: torch.Tensor, mask: torch.Tensor) -> None:
        """Speak of this micro-batch from now on. A filler (all weights zero) counts nowhere."""
        self._weights, self._mask = weights, mask * (weights != 0)

    def add(self, name: str, value: torch.Tensor) -> None:
        """Add a scalar."""
        self._sums[name] = self._sums.get(name, 0.0) + value.detach().float()

    def weighted(self, name: str, values: torch.Tensor) -> None:
        """Add Σ w·values."""
        self.add(name, (values.detach() * self._weights).sum())

    def token_mean(self, name: str, values: torch.Tensor) -> None:
        """Add to the mean of `values` over learned tokens."""
        self.add(name, (values.detach() * self._mask).sum() / self._tokens)

    def token_max(self, name: str, values: torch.Tensor) -> None:
        """Raise the maximum of `values` over learned tokens."""
        value = (values.detach() * self._mask).max().float()
        self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def totals(self, world: Any) -> dict[str, float]:
        """Every metric, over all ranks. A collective."""
        result = {"tokens": float(self._tokens)}
        if self._sums:
            sums = world.sum_tensor(torch.stack(list(self._sums.values())))
            result.update(zip(self._sums, sums.tolist(), strict=True))
        if self._maxima:
            maxima = world.max_tensor(torch.stack(list(self._maxima.values())))
            result.update(zip(self._maxima, maxima.tolist(), strict=True))
        return result
