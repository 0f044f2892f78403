"""The estimators against their definitions, written out as sums over what follows each step."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from cosmos_actor.trainer.estimators import discounted_sums, gae, vtrace


def fragments(seed: int, steps: int = 60, ends: float = 0.15) -> SimpleNamespace:
    """Random steps; about one in seven ends an episode, half of those by termination."""
    draw = np.random.default_rng(seed)
    boundary = draw.random(steps) < ends
    boundary[-1] = True
    bootstrap = np.where(boundary, draw.normal(size=steps) * (draw.random(steps) < 0.5), np.nan)
    return SimpleNamespace(
        rewards=draw.normal(size=steps), values=draw.normal(size=steps), bootstrap=bootstrap, boundary=boundary,
        log_ratios=draw.normal(size=steps) * 0.7,
    )


def columns(data: SimpleNamespace) -> tuple[np.ndarray, ...]:
    return data.rewards, data.values, data.bootstrap, data.boundary


def end_of(data: SimpleNamespace, t: int) -> int:
    """The last step of the fragment that t is in."""
    while not data.boundary[t]:
        t += 1
    return t


def value_after(data: SimpleNamespace, t: int) -> float:
    return float(data.bootstrap[t] if data.boundary[t] else data.values[t + 1])


def reference_gae(data: SimpleNamespace, discount: float, lam: float) -> list[float]:
    """Σ_l (γλ)^l δ_{t+l}, as the paper defines it."""
    result = []
    for t in range(len(data.rewards)):
        total = 0.0
        for later in range(t, end_of(data, t) + 1):
            delta = data.rewards[later] + discount * value_after(data, later) - data.values[later]
            total += (discount * lam) ** (later - t) * delta
        result.append(total)
    return result


def reference_vtrace(data: SimpleNamespace, discount: float, lam: float, rho_bar: float, c_bar: float) -> list[float]:
    """V_s + Σ_t γ^{t-s} (Π_{i<t} c_i) δ_t, as the paper defines it."""
    result = []
    for start in range(len(data.rewards)):
        total = float(data.values[start])
        for t in range(start, end_of(data, start) + 1):
            trace = 1.0
            for i in range(start, t):
                trace *= lam * min(c_bar, math.exp(data.log_ratios[i]))
            rho = min(rho_bar, math.exp(data.log_ratios[t]))
            delta = rho * (data.rewards[t] + discount * value_after(data, t) - data.values[t])
            total += discount ** (t - start) * trace * delta
        result.append(total)
    return result


def monte_carlo(data: SimpleNamespace, discount: float) -> list[float]:
    """Rewards to the end of the fragment, then the bootstrap."""
    result = []
    for t in range(len(data.rewards)):
        last = end_of(data, t)
        earned = sum(discount ** (k - t) * data.rewards[k] for k in range(t, last + 1))
        result.append(earned + discount ** (last + 1 - t) * data.bootstrap[last])
    return result


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("discount", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_gae_is_the_discounted_sum_of_the_errors(seed: int, discount: float, lam: float) -> None:
    data = fragments(seed)
    found = gae(*columns(data), discount, lam)
    np.testing.assert_allclose(found.advantages, reference_gae(data, discount, lam), atol=1e-12)
    np.testing.assert_allclose(found.returns, found.advantages + data.values, atol=1e-12)


def test_at_its_ends_gae_is_the_error_of_one_step_and_the_monte_carlo_return() -> None:
    data = fragments(9)
    one_step = [data.rewards[t] + 0.9 * value_after(data, t) - data.values[t] for t in range(len(data.rewards))]
    np.testing.assert_allclose(gae(*columns(data), 0.9, 0.0).advantages, one_step, atol=1e-12)
    np.testing.assert_allclose(gae(*columns(data), 0.9, 1.0).returns, monte_carlo(data, 0.9), atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rho_bar", "c_bar", "lam"), [(1.0, 1.0, 1.0), (2.0, 0.7, 0.9), (math.inf, math.inf, 1.0)])
def test_vtrace_is_the_sum_of_the_paper(seed: int, rho_bar: float, c_bar: float, lam: float) -> None:
    data = fragments(seed)
    found = vtrace(data.log_ratios, *columns(data), 0.97, lam, rho_bar=rho_bar, c_bar=c_bar)
    expected = reference_vtrace(data, 0.97, lam, rho_bar, c_bar)
    np.testing.assert_allclose(found.returns, expected, atol=1e-10)
    for t in range(len(expected)):
        after = data.bootstrap[t] if data.boundary[t] else expected[t + 1]
        assert found.advantages[t] == pytest.approx(data.rewards[t] + 0.97 * after - data.values[t], abs=1e-10)
        assert found.weights[t] == pytest.approx(min(rho_bar, math.exp(data.log_ratios[t])))


@pytest.mark.parametrize("cap", [1.0, 3.0])
def test_on_policy_vtrace_is_the_monte_carlo_return_and_gae_at_lambda_one(cap: float) -> None:
    data = fragments(3)
    found = vtrace(np.zeros(60), *columns(data), 0.95, rho_bar=cap, c_bar=cap)
    np.testing.assert_allclose(found.returns, monte_carlo(data, 0.95), atol=1e-12)
    np.testing.assert_allclose(found.advantages, gae(*columns(data), 0.95, 1.0).advantages, atol=1e-12)


def test_on_policy_vtrace_has_the_returns_of_gae_at_any_lambda() -> None:
    data = fragments(4)
    found = vtrace(np.zeros(60), *columns(data), 0.95, 0.6)
    np.testing.assert_allclose(found.returns, gae(*columns(data), 0.95, 0.6).returns, atol=1e-12)


def test_a_fragment_does_not_depend_on_its_neighbours() -> None:
    data = fragments(5)
    whole = gae(*columns(data), 0.99, 0.95).advantages
    off = vtrace(data.log_ratios, *columns(data), 0.99).returns
    ends = (np.flatnonzero(data.boundary) + 1).tolist()
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        part = [column[start:stop] for column in columns(data)]
        assert gae(*part, 0.99, 0.95).advantages.tolist() == whole[start:stop].tolist()
        assert vtrace(data.log_ratios[start:stop], *part, 0.99).returns.tolist() == off[start:stop].tolist()


def test_a_ratio_of_zero_leaves_the_value_and_a_huge_one_is_capped() -> None:
    data = fragments(6)
    never = vtrace(np.full(60, -np.inf), *columns(data), 0.99)
    assert never.returns.tolist() == data.values.tolist()
    huge = vtrace(np.full(60, 1e4), *columns(data), 0.99)
    assert huge.returns.tolist() == vtrace(np.zeros(60), *columns(data), 0.99).returns.tolist()


def test_data_that_ends_in_the_middle_is_refused() -> None:
    data = fragments(7)
    data.boundary[-1] = False
    with pytest.raises(ValueError, match="no boundary"):
        gae(*columns(data), 0.99, 0.95)


def test_what_was_earned_begins_anew_after_a_boundary() -> None:
    found = discounted_sums(np.array([1.0, 2.0, 4.0, 1.0, 1.0]), np.array([0, 0, 1, 0, 1], bool), 0.5)
    assert found.tolist() == [1.0, 2.5, 5.25, 1.0, 1.5]
