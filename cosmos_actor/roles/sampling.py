"""How an answer is sampled: the settings, and the noise that makes a sample a function of its seed alone.

No torch. Legend: B sequences, T new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from cosmos_actor.actors.settings import Settings, setting


class SamplingSettings(Settings):
    """The distribution that a rollout samples from. Log-probs are at temperature, before top-p and top-k."""

    temperature: float = setting(1.0, "logits are divided by it; 0 takes the likeliest token", ge=0.0)
    top_p: float = setting(1.0, "smallest set of tokens that holds this probability; 1 keeps all", gt=0.0, le=1.0)
    top_k: int = setting(0, "only the k likeliest tokens; 0 keeps all", ge=0)
    max_new_tokens: int = setting(64, "longest answer", unit="tokens", ge=1)
    stop_ids: tuple[int, ...] = Field(
        default=(), strict=False, description="token ids that end an answer; empty takes the tokenizer's"
    )

    @property
    def logprob_temperature(self) -> float:
        """The temperature that log-probs are under: greedy answers are scored at 1, where the policy is a policy."""
        return self.temperature if self.temperature > 0 else 1.0

    @property
    def truncates(self) -> bool:
        """Whether top-p or top-k removes any token."""
        return self.top_k > 0 or self.top_p < 1.0


def uniforms(seeds: Sequence[tuple[int, int]], count: int) -> np.ndarray:
    """Noise for each (seed, sample): [B, count] float64 in [0, 1).

    Entry [b, t] depends on seeds[b] and t alone: not on B, on the neighbours, or on `count`.
    """
    noise = np.empty((len(seeds), count), dtype=np.float64)
    for row, (seed, sample) in zip(noise, seeds, strict=True):
        key = np.array([seed & 0xFFFFFFFFFFFFFFFF, sample], dtype=np.uint64)
        np.random.Generator(np.random.Philox(key=key)).random(out=row)
    return noise
