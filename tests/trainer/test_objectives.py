"""Every objective against a float64 reference that shares no code with it, and the invariants that need none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cosmos_actor.trainer.advantages import grpo_advantages, whether_informative
from cosmos_actor.trainer.objectives import kl_estimate, log_ratio, ppo_clip, token_weights
from tests.trainer import reference

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def columns(seed: int = 0) -> tuple[np.ndarray, ...]:
    """x, o, r, A [6, 9] float64, far enough apart that the clip decides some of them."""
    chance = np.random.default_rng(seed)
    x = -chance.exponential(1.0, (6, 9))
    o = x + chance.normal(0, 0.4, (6, 9))
    r = x + chance.normal(0, 0.6, (6, 9))
    return x, o, r, chance.normal(0, 1, (6, 9))


def ragged_mask() -> np.ndarray:
    """[6, 9]: rows with 9, 4, 0, 1, 6 and 2 learned tokens."""
    mask = np.zeros((6, 9))
    for row, count in enumerate((9, 4, 0, 1, 6, 2)):
        mask[row, 9 - count :] = 1
    return mask


@pytest.mark.parametrize("dual", [0.0, 3.0])
def test_ppo_clip_equals_the_reference(dual: float) -> None:
    x, o, _, A = columns()
    o[0, 0] = x[0, 0] - 3.0  # a ratio of 20, where dual clipping speaks
    A[0, 0] = -1.0
    result = ppo_clip(*map(torch.tensor, (x, o, A)), low=0.2, high=0.28, dual=dual)
    expected = np.vectorize(reference.clip_loss)(x, o, A, 0.2, 0.28, dual)
    np.testing.assert_allclose(result.loss.numpy(), expected, rtol=1e-12, atol=1e-12)
    assert result.clipped.any() and not result.clipped.all()


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
def test_kl_estimates_equal_the_reference(estimator: str) -> None:
    x, _, r, _ = columns(1)
    value = kl_estimate(torch.tensor(x), torch.tensor(r), estimator)
    expected = np.vectorize(reference.kl)(x, r, estimator)
    np.testing.assert_allclose(value.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
def test_straight_through_estimates_have_the_gradient_of_k2(estimator: str) -> None:
    x, _, r, _ = columns(2)
    leaf = torch.tensor(x, requires_grad=True)
    kl_estimate(leaf, torch.tensor(r), estimator).sum().backward()
    np.testing.assert_allclose(leaf.grad.numpy(), x - r, rtol=1e-12)


def test_kl_of_equal_policies_is_exactly_zero_and_far_ones_are_bounded() -> None:
    x = torch.tensor([-3.0, -0.1])
    for estimator in ("k1", "abs", "k2", "k3", "k1+", "k3+"):
        assert kl_estimate(x, x.clone(), estimator).tolist() == [0.0, 0.0]
    assert kl_estimate(torch.tensor([-90.0]), torch.tensor([-1.0]), "k3").item() == 10.0
    assert log_ratio(torch.tensor([0.0]), torch.tensor([-90.0])).item() == 20.0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="k9"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k9")
    with pytest.raises(ValueError, match="median"):
        token_weights(np.ones((1, 1)), "median")


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_weights_aggregate_as_the_reference_does(how: str) -> None:
    losses, mask = columns(3)[3], ragged_mask()
    weighted = float((token_weights(mask, how, length=7) * losses).sum())
    assert weighted == pytest.approx(reference.aggregate(losses, mask, how, 7), rel=1e-12)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_a_batch_without_tokens_weighs_nothing(how: str) -> None:
    assert token_weights(np.zeros((3, 4)), how).sum() == 0.0


@pytest.mark.parametrize("with_std", [True, False])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-4])
def test_advantages_equal_the_reference(epsilon: float, with_std: bool) -> None:
    rewards = [0.0, 1.0, 1.0, 0.25, 0.0, 0.5]
    result = grpo_advantages(np.array(rewards), epsilon=epsilon, normalise_std=with_std)
    np.testing.assert_allclose(result, reference.advantages(rewards, epsilon, with_std), rtol=1e-12)


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.1] * 7, [0.3], []])
def test_a_tied_group_gives_exactly_zero(rewards: list[float]) -> None:
    assert grpo_advantages(np.array(rewards, dtype=np.float32)).tolist() == [0.0] * len(rewards)
    assert not whether_informative(np.array(rewards))


def test_shuffling_permutes_and_a_constant_changes_nothing() -> None:
    rewards = np.array([0.0, 1.0, 0.5, 0.0, 1.0])
    order = np.array([3, 1, 4, 0, 2])
    base = grpo_advantages(rewards)
    np.testing.assert_allclose(grpo_advantages(rewards[order]), base[order], rtol=1e-12)
    np.testing.assert_allclose(grpo_advantages(rewards + 8.0), base, rtol=1e-12)
    assert whether_informative(rewards)
