"""Flow matching and the flow-SDE against a numpy reference in float64, written from the equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cosmos_actor.trainer.flow import (
    chain_entropy,
    chain_logprob,
    draw_chain,
    likeliest_chain,
    matching_loss,
    transition,
)

ROWS, STEPS, CHUNK, ELEMENTS, ETA = 5, 4, 3, 2, 0.6


def field(x, time):
    """Some velocity, for numpy and torch alike."""
    return 0.7 * x - 0.3 * (x * x * x) * time.reshape(-1, 1, 1) + time.reshape(-1, 1, 1)


def reference(noise: np.ndarray, eta: float) -> tuple[np.ndarray, np.ndarray]:
    """The chain and its log-prob, step by step."""
    steps = noise.shape[1] - 1
    delta = 1.0 / steps
    chain, total = [noise[:, 0]], np.zeros(len(noise))
    for step in range(steps):
        tau, x = step * delta, chain[-1]
        v = field(x, np.full(len(x), tau))
        sigma = eta * math.sqrt((1 - max(tau, delta)) / max(tau, delta))
        guessed_noise = x - tau * v
        score = -guessed_noise / (1 - tau)
        mean = x + (v + 0.5 * sigma**2 * score) * delta
        std = sigma * math.sqrt(delta)
        after = mean + std * noise[:, step + 1]
        density = np.exp(-((after - mean) ** 2) / (2 * std**2)) / math.sqrt(2 * math.pi * std**2)
        total += np.log(density).sum(axis=(1, 2))
        chain.append(after)
    return np.stack(chain, axis=1), total


@pytest.fixture
def noise() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, STEPS + 1, CHUNK, ELEMENTS))


def test_a_chain_and_its_log_prob_are_the_equations(noise: np.ndarray) -> None:
    chain, logprob = draw_chain(field, torch.from_numpy(noise), ETA)
    expected = reference(noise, ETA)
    np.testing.assert_allclose(chain.numpy(), expected[0], atol=1e-12)
    np.testing.assert_allclose(logprob.numpy(), expected[1], atol=1e-10)
    np.testing.assert_allclose(chain_logprob(field, chain, ETA).numpy(), expected[1], atol=1e-9)


def test_entropy_is_the_mean_of_minus_log_prob(noise: np.ndarray) -> None:
    many = torch.from_numpy(np.random.default_rng(1).standard_normal((20_000, STEPS + 1, CHUNK, ELEMENTS)))
    _, logprob = draw_chain(field, many, ETA)
    assert chain_entropy(tuple(many.shape[1:]), ETA) == pytest.approx(float(-logprob.mean()), abs=0.05)


def test_the_sde_has_the_marginals_of_the_ode() -> None:
    """For data N(3, 0.5²) the velocity is known: v = E[a - ε | x_τ]. With many steps both samplers give the data."""

    def velocity(x, time):
        tau = time.reshape(-1, 1, 1)
        variance = tau**2 * 0.25 + (1 - tau) ** 2
        surprise = (x - 3.0 * tau) / variance
        return (3.0 + tau * 0.25 * surprise) - (1 - tau) * surprise

    draws = torch.from_numpy(np.random.default_rng(2).standard_normal((4000, 129, 1, 1)))
    stochastic, _ = draw_chain(velocity, draws, 0.5)
    plain = likeliest_chain(velocity, draws[:, 0], 128)
    for last in (stochastic[:, -1], plain[:, -1]):
        assert float(last.mean()) == pytest.approx(3.0, abs=0.04) and float(last.std()) == pytest.approx(0.5, abs=0.03)


def test_the_sde_without_noise_is_the_ode(noise: np.ndarray) -> None:
    x = torch.from_numpy(noise[:, 0])
    mean, std = transition(x, field(x, torch.full((ROWS,), 0.25)), 1, STEPS, 1e-9)
    np.testing.assert_allclose(mean.numpy(), (x + field(x, torch.full((ROWS,), 0.25)) / STEPS).numpy(), atol=1e-12)
    assert std < 1e-8


def test_one_step_is_enough_for_a_likelihood(noise: np.ndarray) -> None:
    chain, logprob = draw_chain(field, torch.from_numpy(noise[:, :2]), ETA)
    assert torch.isfinite(logprob).all() and chain.shape == (ROWS, 2, CHUNK, ELEMENTS)
    np.testing.assert_allclose(chain_logprob(field, chain, ETA).numpy(), logprob.numpy(), atol=1e-9)


def test_matching_is_zero_for_the_true_velocity_and_its_gradient_points_there() -> None:
    draw = np.random.default_rng(3)
    actions, eps = (torch.from_numpy(draw.standard_normal((ROWS, CHUNK, ELEMENTS))) for _ in range(2))
    time = torch.from_numpy(draw.random(ROWS))
    assert float(matching_loss(lambda x, tau: actions - eps, actions, eps, time).abs().max()) == 0.0
    seen = []
    matching_loss(lambda x, tau: seen.append(x) or x, actions, eps, time)
    expected = (1 - time[:, None, None]) * eps + time[:, None, None] * actions
    np.testing.assert_allclose(seen[0].numpy(), expected.numpy(), atol=1e-12)
