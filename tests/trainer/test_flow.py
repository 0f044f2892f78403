"""Flow matching and the flow-SDE against a numpy reference in float64, written from the equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cosmos_actor.trainer.flow import FlowSde, likeliest_chain, matching_loss

ROWS, STEPS, CHUNK, ELEMENTS, ETA = 5, 4, 3, 2, 0.6
SDES = [FlowSde(STEPS, CHUNK, ETA, correlation, noisy) for correlation in (0.0, 0.7) for noisy in (0, 1, 2, STEPS + 1)]
each_sde = pytest.mark.parametrize("sde", SDES, ids=lambda sde: f"correlation {sde.correlation}, noisy {sde.noisy}")


def field(x, time):
    """Some velocity, for numpy and torch alike."""
    return 0.7 * x - 0.3 * (x * x * x) * time.reshape(-1, 1, 1) + time.reshape(-1, 1, 1)


def reference(noise: np.ndarray, sde: FlowSde) -> tuple[np.ndarray, np.ndarray]:
    """The chain and its log-prob, step by step, with the density of a multivariate normal."""
    delta, rho = 1.0 / STEPS, sde.correlation
    covariance = np.full((CHUNK, CHUNK), rho) + (1 - rho) * np.eye(CHUNK)
    chain, total = [noise[:, 0]], np.zeros(len(noise))
    for step in range(STEPS):
        tau, x = step * delta, chain[-1]
        v = field(x, np.full(len(x), tau))
        if sde.noisy and step < STEPS - sde.noisy:
            chain.append(x + v * delta)
            continue
        sigma = sde.eta * math.sqrt((1 - max(tau, delta)) / max(tau, delta))
        score = -(x - tau * v) / (1 - tau)
        mean = x + (v + 0.5 * sigma**2 * np.einsum("kl,nla->nka", covariance, score)) * delta
        spread = sigma**2 * delta * covariance
        after = mean + np.einsum("kl,nla->nka", np.linalg.cholesky(spread), noise[:, step + 1])
        for row, element in np.ndindex(len(noise), ELEMENTS):
            away = (after - mean)[row, :, element]
            density = np.exp(-0.5 * away @ np.linalg.solve(spread, away)) / math.sqrt(
                (2 * math.pi) ** CHUNK * np.linalg.det(spread))
            total[row] += math.log(density)
        chain.append(after)
    return np.stack(chain, axis=1), total


@pytest.fixture
def noise() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, STEPS + 1, CHUNK, ELEMENTS))


@each_sde
def test_a_chain_and_its_log_prob_are_the_equations(noise: np.ndarray, sde: FlowSde) -> None:
    chain, logprob = sde.draw(field, torch.from_numpy(noise))
    expected = reference(noise, sde)
    np.testing.assert_allclose(chain.numpy(), expected[0], atol=1e-12)
    np.testing.assert_allclose(logprob.numpy(), expected[1], atol=1e-10)
    np.testing.assert_allclose(sde.logprob(field, chain).numpy(), expected[1], atol=1e-9)


@each_sde
def test_entropy_is_the_mean_of_minus_log_prob(sde: FlowSde) -> None:
    many = torch.from_numpy(np.random.default_rng(1).standard_normal((20_000, STEPS + 1, CHUNK, ELEMENTS)))
    assert sde.entropy(ELEMENTS) == pytest.approx(float(-sde.draw(field, many)[1].mean()), abs=0.05)


@pytest.mark.parametrize("noisy", [0, 48])
@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_the_sde_has_the_marginals_of_the_ode(correlation: float, noisy: int) -> None:
    """For data N(3, 0.5²) the velocity is known: v = E[a - ε | x_τ]. With many steps both samplers give the data."""

    def velocity(x, time):
        tau = time.reshape(-1, 1, 1)
        surprise = (x - 3.0 * tau) / (tau**2 * 0.25 + (1 - tau) ** 2)
        return (3.0 + tau * 0.25 * surprise) - (1 - tau) * surprise

    draws = torch.from_numpy(np.random.default_rng(2).standard_normal((4000, 129, 2, 1)))
    stochastic, _ = FlowSde(128, 2, 0.5, correlation, noisy).draw(velocity, draws)
    plain = likeliest_chain(velocity, draws[:, 0], 128)
    for last in (stochastic[:, -1], plain[:, -1]):
        assert float(last.mean()) == pytest.approx(3.0, abs=0.04) and float(last.std()) == pytest.approx(0.5, abs=0.03)
        assert float(torch.corrcoef(last[:, :, 0].T)[0, 1]) == pytest.approx(0.0, abs=0.06)  # as the data are


def test_the_sde_without_noise_is_the_ode(noise: np.ndarray) -> None:
    x = torch.from_numpy(noise[:, 0])
    v = field(x, torch.full((ROWS,), 0.25))
    mean, std = FlowSde(STEPS, CHUNK, 1e-9).transition(x, v, 1)
    np.testing.assert_allclose(mean.numpy(), (x + v / STEPS).numpy(), atol=1e-12)
    assert std < 1e-8


def test_one_step_is_enough_for_a_likelihood(noise: np.ndarray) -> None:
    sde = FlowSde(1, CHUNK, ETA)
    chain, logprob = sde.draw(field, torch.from_numpy(noise[:, :2]))
    assert torch.isfinite(logprob).all() and chain.shape == (ROWS, 2, CHUNK, ELEMENTS)
    np.testing.assert_allclose(sde.logprob(field, chain).numpy(), logprob.numpy(), atol=1e-9)


def test_matching_is_zero_for_the_true_velocity_and_its_gradient_points_there() -> None:
    draw = np.random.default_rng(3)
    actions, eps = (torch.from_numpy(draw.standard_normal((ROWS, CHUNK, ELEMENTS))) for _ in range(2))
    time = torch.from_numpy(draw.random(ROWS))
    assert float(matching_loss(lambda x, tau: actions - eps, actions, eps, time).abs().max()) == 0.0
    seen = []
    matching_loss(lambda x, tau: seen.append(x) or x, actions, eps, time)
    expected = (1 - time[:, None, None]) * eps + time[:, None, None] * actions
    np.testing.assert_allclose(seen[0].numpy(), expected.numpy(), atol=1e-12)
