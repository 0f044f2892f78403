"""Flow matching, and the stochastic sampler that gives what it draws a likelihood. Pure functions of tensors.

Legend
    n  rows        T  sampler steps, δ = 1/T        K x A  a chunk of K actions of A elements
    τ  time: 0 is noise, 1 is the action            v(x, τ)  the velocity that a network predicts
    chain [n, T+1, K, A]: x_0 the noise that a draw begins with, …, x_T the action

Flow matching (Lipman et al. 2023, rectified as in Liu et al. 2023):
    x_τ = (1 - τ)·ε + τ·a,    v is trained towards a - ε

flow-SDE (Liu et al. 2025, "Flow-GRPO", equation 9; for actions: Chen et al. 2025, "π_RL"). The same marginals as the
ODE dx = v dτ, with noise, so that each step is a Gaussian whose density is known:
    dx = [v - σ²/(2(1-τ))·(x - τ·v)] dτ + σ dw,    σ = η·sqrt((1-τ)/τ), at τ = 0 that of the first step's end
(x - τ·v is the network's guess of ε, and -ε/(1-τ) the score of x_τ.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x [n, K, A], τ [n]) -> [n, K, A]"""
HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def matching_loss(velocity: Velocity, actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """(v(x_τ, τ) - (a - ε))² of each element [n, K, A], for a, ε [n, K, A] and τ [n]."""
    at = time[:, None, None]
    mixed = (1.0 - at) * noise + at * actions
    return (velocity(mixed, time) - (actions - noise)).square()


def diffusion(step: int, steps: int, eta: float) -> float:
    """σ of the step that begins at τ = step / steps."""
    time = max(step, 1) / steps
    if time >= 1.0:  # one step only: it begins and ends at once
        return eta
    return eta * math.sqrt((1.0 - time) / time)


def transition(x: Tensor, v: Tensor, step: int, steps: int, eta: float) -> tuple[Tensor, float]:
    """Mean [n, K, A] and standard deviation of x at τ = (step + 1)/steps, given x and v(x) at τ = step/steps."""
    time, delta = step / steps, 1.0 / steps
    sigma = diffusion(step, steps, eta)
    drift = v - sigma**2 / (2.0 * (1.0 - time)) * (x - time * v)
    return x + delta * drift, sigma * math.sqrt(delta)


def draw_chain(velocity: Velocity, noise: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """noise [n, T+1, K, A], standard normal -> the chain, and its log-prob [n] given x_0.

    x_0 = noise[:, 0]; the others are drawn with the flow-SDE.
    """
    steps, x = noise.shape[1] - 1, noise[:, 0]
    chain, logprob = [x], x.new_zeros(len(x))
    for step in range(steps):
        mean, std = transition(x, velocity(x, _time(x, step, steps)), step, steps, eta)
        x = mean + std * noise[:, step + 1]
        chain.append(x)
        logprob = logprob + gaussian_logprob(noise[:, step + 1], std)
    return torch.stack(chain, dim=1), logprob


def likeliest_chain(velocity: Velocity, noise: Tensor, steps: int) -> Tensor:
    """The chain [n, T+1, K, A] of the ODE from x_0 = noise [n, K, A]."""
    x, chain = noise, [noise]
    for step in range(steps):
        x = x + velocity(x, _time(x, step, steps)) / steps
        chain.append(x)
    return torch.stack(chain, dim=1)


def chain_logprob(velocity: Velocity, chain: Tensor, eta: float) -> Tensor:
    """[n]: the log-density of x_1 … x_T given x_0, nats. All steps are one pass of `velocity` over n·T rows."""
    rows, steps = chain.shape[0], chain.shape[1] - 1
    before = chain[:, :-1].reshape(rows * steps, *chain.shape[2:])
    times = torch.arange(steps, device=chain.device, dtype=chain.dtype).div(steps).repeat(rows)
    v = velocity(before, times).reshape(rows, steps, *chain.shape[2:])
    total = chain.new_zeros(rows)
    for step in range(steps):
        mean, std = transition(chain[:, step], v[:, step], step, steps, eta)
        total = total + gaussian_logprob((chain[:, step + 1] - mean) / std, std)
    return total


def chain_entropy(shape: tuple[int, ...], eta: float) -> float:
    """Nats of x_1 … x_T given their predecessors, for chains of (T+1, K, A): a constant, since the noise is."""
    steps, elements = shape[0] - 1, math.prod(shape[1:])
    stds = [diffusion(step, steps, eta) * math.sqrt(1.0 / steps) for step in range(steps)]
    return elements * sum(math.log(std) + 0.5 + HALF_LOG_TWO_PI for std in stds)


def gaussian_logprob(standard: Tensor, std: float) -> Tensor:
    """[n] of (x - mean)/std [n, …]."""
    per_row = standard.flatten(1)
    return -0.5 * per_row.square().sum(1) - per_row.shape[1] * (math.log(std) + HALF_LOG_TWO_PI)


def _time(x: Tensor, step: int, steps: int) -> Tensor:
    return x.new_full((len(x),), step / steps)
