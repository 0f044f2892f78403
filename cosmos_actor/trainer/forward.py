"""The one forward pass that training, scoring and references share.

Legend: B sequences, T longest sequence, K columns that are scored (all from the first learned token on), V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from cosmos_actor.trainer.batch import Batch, micro_batches


class Scores(NamedTuple):
    """Per token [B, T]; zero before the first learned column."""

    logprobs: torch.Tensor
    """Nats, float32, under the model at `temperature`."""
    entropy: torch.Tensor
    """Nats, float32, of the distribution the token was drawn from; has a gradient only where asked for."""


def score_tokens(
    model: torch.nn.Module,
    batch: Batch,
    *,
    temperature: float,
    autocast: torch.dtype | None = None,
    entropy_gradient: bool = False,
) -> Scores:
    """Log-prob and entropy of every token of `batch` from its first learned column on.

    Softmax is float32 whatever the model computes in, and tempered as the engine tempers it.
    """
    device = next(model.parameters()).device
    tokens = torch.from_numpy(batch.tokens).to(device)
    first = first_learned_column(batch)
    with torch.autocast(device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        output = model(input_ids=tokens, use_cache=False, logits_to_keep=tokens.shape[1] - first + 1)
    logits = output.logits[:, :-1].float() / temperature
    normaliser = logits.logsumexp(dim=-1)
    logprobs = logits.gather(2, tokens[:, first:, None])[..., 0] - normaliser
    padding = (first, 0)
    return Scores(
        torch.nn.functional.pad(logprobs, padding),
        torch.nn.functional.pad(_entropy(logits, normaliser, entropy_gradient), padding),
    )


def first_learned_column(batch: Batch) -> int:
    """The smallest column that any row learns from; at least 1, because the first token has nothing before it."""
    learned = batch.mask.any(axis=0)
    return max(int(learned.argmax()), 1) if learned.any() else batch.tokens.shape[1] - 1


@torch.no_grad()
def score_batch(
    model: torch.nn.Module, batch: Batch, *, temperature: float, max_tokens: int, autocast: torch.dtype | None = None
) -> np.ndarray:
    """Log-probs [B, T] float32 of a whole batch, micro-batch by micro-batch, without gradients; zero where mask is."""
    result = np.zeros(batch.tokens.shape, dtype=np.float32)
    for rows in micro_batches(batch.lengths, max_tokens):
        part = batch.rows(rows)
        scores = score_tokens(model, part, temperature=temperature, autocast=autocast).logprobs.cpu().numpy()
        result[rows, : scores.shape[1]] = scores * part.mask
    return result


def _entropy(logits: torch.Tensor, normaliser: torch.Tensor, gradient: bool) -> torch.Tensor:
    """H = log Z - E[logit]; [B, K] from logits [B, K, V]."""
    with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
        return normaliser - (logits.softmax(dim=-1) * logits).sum(dim=-1)
