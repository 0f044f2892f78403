"""What a batch keeps of its groups, and how it is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.trainer.advantages import grpo_advantages
from cosmos_actor.trainer.batch import (
    BatchError,
    batch_from_examples,
    batch_from_groups,
    micro_batches,
    mini_batch_rows,
    ragged,
)
from tests.actors.groups import make_group


def scored(number: int, lengths: tuple[int, ...]):
    rewards = np.arange(len(lengths), dtype=np.float32)
    return make_group(number, lengths).with_field("rewards", rewards, "reward-0")


def test_the_very_tokens_that_were_sampled_are_trained() -> None:
    group = scored(0, (2, 3, 1))
    batch = batch_from_groups([group], grpo_advantages)
    for row, part in enumerate(group.slices()):
        length = len(group.prompt) + len(group.tokens[part])
        assert batch.tokens[row, :length].tolist() == [*group.prompt, *group.tokens[part]]
        assert batch.mask[row].tolist() == [0] * 4 + [1] * (length - 4) + [0] * (7 - length)
        assert batch.old_logprobs[row, 4:length].tolist() == group.logprobs[part].tolist()
    assert batch.lengths.tolist() == [6, 7, 5]
    assert batch.token_count == group.token_count


def test_ragged_undoes_the_padding() -> None:
    groups = [scored(0, (2, 3, 1)), scored(1, (4, 1))]
    batch = batch_from_groups(groups)
    parts = ragged(batch, batch.old_logprobs, groups)
    assert [part.tolist() for part in parts] == [group.logprobs.tolist() for group in groups]


def test_an_empty_answer_has_a_row_and_no_token() -> None:
    groups = [make_group(0, (0, 2))]
    batch = batch_from_groups(groups)
    assert batch.mask.sum(axis=1).tolist() == [0, 2]
    assert len(ragged(batch, batch.old_logprobs, groups)[0]) == 2


def test_rows_are_cut_to_their_own_longest() -> None:
    batch = batch_from_examples([([1, 2], [3]), ([1], [2, 3, 4, 5])])
    part = batch.rows(np.array([0]))
    assert part.tokens.tolist() == [[1, 2, 3]] and part.mask.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: batch_from_groups([]), "no trajectories"),
        (lambda: batch_from_groups([make_group(0)], grpo_advantages), "no rewards"),
        (lambda: batch_from_examples([]), "no demonstrations"),
        (lambda: batch_from_examples([([], [1])]), "prompt has no tokens"),
    ],
)
def test_what_can_not_be_trained_on_is_refused(make, why: str) -> None:
    with pytest.raises(BatchError, match=why):
        make()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_in_order_within_the_limit(lengths: list[int], limit: int) -> None:
    parts = micro_batches(np.array(lengths), limit)
    assert [row for part in parts for row in part.tolist()] == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or max(lengths[row] for row in part) * len(part) <= limit


def test_mini_batches_never_split_a_group() -> None:
    groups = [make_group(number, (1,) * samples) for number, samples in enumerate((3, 1, 2, 4, 2))]
    parts = mini_batch_rows(groups, 2)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert len(mini_batch_rows(groups, 99)) == 5
