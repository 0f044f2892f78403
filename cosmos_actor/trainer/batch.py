"""A padded batch made from ragged groups or from demonstrations, and its split into micro-batches. Numpy only.

Legend
    B  sequences, T  longest sequence (prompt and answer)
    Column t speaks of token t: mask[b, t] is 1 when token t was sampled (or demonstrated) and is to be learned from.
Padding is on the right: in a causal model it can not touch what comes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from cosmos_actor.actors.trajectory import TrajectoryGroup

WHOLE_NUMBERS = ("tokens", "versions")
"""Columns of int64; the others are float32."""


class BatchError(ValueError):
    """What was given can not be trained on."""


@dataclass(frozen=True)
class Batch:
    """Arrays of equal shape; a row never depends on its neighbours."""

    tokens: np.ndarray
    """[B, T] int64."""
    mask: np.ndarray
    """[B, T] float32."""
    lengths: np.ndarray
    """[B] int64, tokens of each sequence."""
    engine_logprobs: np.ndarray
    """[B, T] float32, as the engine sampled the tokens; zero where unknown."""
    old_logprobs: np.ndarray
    """[B, T] float32, the ratio's denominator: the engine's, unless the trainer put its own there."""
    reference_logprobs: np.ndarray
    """[B, T] float32, zero where unknown."""
    advantages: np.ndarray
    """[B, T] float32."""
    versions: np.ndarray
    """[B, T] int64, the weights that sampled each token; zero where unknown."""

    @property
    def size(self) -> int:
        """B."""
        return int(self.tokens.shape[0])

    @property
    def token_count(self) -> int:
        """Tokens that are learned from."""
        return int(self.mask.sum())

    def rows(self, index: np.ndarray) -> Batch:
        """The rows `index`, cut to their own longest sequence."""
        length = int(self.lengths[index].max())
        cut = {field.name: getattr(self, field.name)[index] for field in fields(self)}
        return Batch(**{name: value if value.ndim == 1 else value[:, :length] for name, value in cut.items()})

    def with_old_logprobs(self, logprobs: np.ndarray) -> Batch:
        """This batch with other log-probs [B, T] in the ratio's denominator."""
        return replace(self, old_logprobs=logprobs)

    def weighted(self, weights: np.ndarray) -> Batch:
        """This batch with advantages times `weights` [B, T], 0 or more: a policy loss is linear in the advantage."""
        return replace(self, advantages=(self.advantages * weights).astype(np.float32))


def batch_from_groups(
    groups: Sequence[TrajectoryGroup], advantage: Callable[[np.ndarray], np.ndarray] | None = None
) -> Batch:
    """One row a sample, in the groups' order. `advantage` maps a group's rewards [G] to advantages [G].

    Without it advantages are zero, for scoring. Raises BatchError for no groups or a group without rewards.
    """
    if not any(group.samples for group in groups):
        raise BatchError("there are no trajectories to train on: lower `replay_buffer` limits or check the rewards")
    rows: list[dict[str, np.ndarray]] = []
    for group in groups:
        rows += _rows_of(group, advantage)
    return _padded(rows)


def batch_from_examples(examples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
    """One row a demonstration (prompt tokens, answer tokens); the answer is learned, the prompt is not."""
    if not examples:
        raise BatchError("there are no demonstrations to train on")
    return _padded([_row(np.asarray(prompt), np.asarray(answer)) for prompt, answer in examples])


def ragged(batch: Batch, values: np.ndarray, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
    """The learned positions of `values` [B, T] as one float32 [N] array a group: the inverse of `batch_from_groups`."""
    flat = values[batch.mask > 0].astype(np.float32)
    ends = np.cumsum([group.token_count for group in groups])
    return np.split(flat, ends[:-1])


def micro_batches(lengths: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Row indices [B] in consecutive runs, each of at most `max_tokens` padded tokens or of a single row."""
    parts: list[list[int]] = [[]]
    longest = 0
    for row, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if parts[-1] and longest * (len(parts[-1]) + 1) > max_tokens:
            parts.append([])
            longest = length
        parts[-1].append(row)
    return [np.array(part, dtype=np.int64) for part in parts if part]


def mini_batch_rows(groups: Sequence[TrajectoryGroup], count: int) -> list[np.ndarray]:
    """Rows of `count` mini-batches of nearly equal numbers of groups; a group is never split."""
    owner = np.repeat(np.arange(len(groups)), [group.samples for group in groups])
    shares = np.array_split(np.arange(len(groups)), min(count, len(groups)))
    return [np.flatnonzero(np.isin(owner, share)) for share in shares]


def _rows_of(
    group: TrajectoryGroup, advantage: Callable[[np.ndarray], np.ndarray] | None
) -> list[dict[str, np.ndarray]]:
    if advantage is None:
        advantages = np.zeros(group.samples)
    elif group.rewards is None:
        raise BatchError(f"group {group.group_id} has no rewards: score it before it is trained on")
    else:
        advantages = advantage(group.rewards)
    reference = group.reference_logprobs
    return [
        _row(
            group.prompt,
            group.tokens[part],
            old=group.logprobs[part],
            reference=None if reference is None else reference[part],
            advantage=float(value),
            versions=group.versions[part],
        )
        for part, value in zip(group.slices(), advantages, strict=True)
    ]


def _row(
    prompt: np.ndarray,
    answer: np.ndarray,
    *,
    old: np.ndarray | None = None,
    reference: np.ndarray | None = None,
    advantage: float = 0.0,
    versions: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    if len(prompt) == 0:
        raise BatchError("a prompt has no tokens, so its answer's first token has no log-prob")
    before = np.zeros(len(prompt))
    zeros = np.zeros(len(answer))
    engine = np.concatenate([before, zeros if old is None else old])
    return {
        "tokens": np.concatenate([prompt, answer]),
        "mask": np.concatenate([before, np.ones(len(answer))]),
        "engine_logprobs": engine,
        "old_logprobs": engine,
        "reference_logprobs": np.concatenate([before, zeros if reference is None else reference]),
        "advantages": np.concatenate([before, zeros + advantage]),
        "versions": np.concatenate([before, zeros if versions is None else versions]),
    }


def _padded(rows: list[dict[str, np.ndarray]]) -> Batch:
    lengths = np.array([len(row["tokens"]) for row in rows], dtype=np.int64)
    shape = (len(rows), int(lengths.max()))
    columns = {name: np.zeros(shape, dtype=np.int64 if name in WHOLE_NUMBERS else np.float32) for name in rows[0]}
    for index, row in enumerate(rows):
        for name, values in row.items():
            columns[name][index, : len(values)] = values
    return Batch(lengths=lengths, **columns)
