"""Flow matching, and the stochastic sampler that gives what it draws a likelihood. Functions of tensors.

Legend
    n  rows        T  sampler steps, δ = 1/T        K x A  a chunk of K actions of A elements
    τ  time: 0 is noise, 1 is the action            v(x, τ)  the velocity that a network predicts
    chain [n, T+1, K, A]: x_0 the noise that a draw begins with, …, x_T the action

Flow matching (Lipman et al. 2023, rectified as in Liu et al. 2023):
    x_τ = (1 - τ)·ε + τ·a,    v is trained towards a - ε

flow-SDE (Liu et al. 2025, "Flow-GRPO", equation 9; for actions: Chen et al. 2025, "π_RL"). The same marginals as the
ODE dx = v dτ, with noise, so that each step is a Gaussian whose density is known:
    dx = [v - σ²/(2(1-τ))·C(x - τ·v)] dτ + σ·L dw,    σ = η·sqrt((1-τ)/τ), at τ = 0 that of the first step's end
(x - τ·v is the network's guess of ε, and -ε/(1-τ) the score of x_τ.) C = L·Lᵀ correlates the noise of a chunk's
actions: C = (1-ρ)·I + ρ·11ᵀ over K. Independent noise (ρ = 0) averages itself out over a chunk and explores little.
Only the last steps may be noisy, the others being the ODE's (Ren et al. 2025, "DPPO", train the last ones alone): what
is drawn early the flow partly undoes, so it explores little and costs the gradient as much noise as the rest. What the
ODE has made is then taken as given, though its steps move with the weights: an approximation, DPPO freezes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
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


def likeliest_chain(velocity: Velocity, noise: Tensor, steps: int) -> Tensor:
    """The chain [n, T+1, K, A] of the ODE from x_0 = noise [n, K, A]."""
    x, chain = noise, [noise]
    for step in range(steps):
        x = x + velocity(x, _time(x, step, steps)) / steps
        chain.append(x)
    return torch.stack(chain, dim=1)


@dataclass(frozen=True)
class FlowSde:
    """The sampler with noise η of T `steps` for chunks of K actions, correlated by 0 <= ρ < 1.

    Its last `noisy` steps are stochastic, all if that is 0 or more than there are. The log-prob is theirs alone.
    """

    steps: int
    chunk: int
    eta: float
    correlation: float = 0.0
    noisy: int = 0

    def draw(self, velocity: Velocity, noise: Tensor) -> tuple[Tensor, Tensor]:
        """noise [n, T+1, K, A], standard normal -> the chain, and its log-prob [n] given x_0 = noise[:, 0], nats."""
        x, logprob = noise[:, 0], noise.new_zeros(len(noise))
        chain, colour = [x], self._colour(noise)
        for step in range(self._first):
            x = x + velocity(x, _time(x, step, self.steps)) / self.steps
            chain.append(x)
        for step in range(self._first, self.steps):
            mean, std = self.transition(x, velocity(x, _time(x, step, self.steps)), step)
            white = noise[:, step + 1]
            x = mean + std * (colour @ white)
            chain.append(x)
            logprob = logprob + self._logprob(white, std)
        return torch.stack(chain, dim=1), logprob

    def logprob(self, velocity: Velocity, chain: Tensor) -> Tensor:
        """[n]: the log-density of the noisy steps' x given their predecessors, nats; one pass of `velocity` for all."""
        rows, first, steps = len(chain), self._first, self.steps
        before = chain[:, first:-1].flatten(0, 1)
        times = torch.arange(first, steps, device=chain.device, dtype=chain.dtype).div(steps).repeat(rows)
        v = velocity(before, times).reshape(rows, steps - first, *chain.shape[2:])
        total, whitener = chain.new_zeros(rows), torch.linalg.inv(self._colour(chain))
        for step in range(first, steps):
            mean, std = self.transition(chain[:, step], v[:, step - first], step)
            total = total + self._logprob(whitener @ ((chain[:, step + 1] - mean) / std), std)
        return total

    def entropy(self, elements: int) -> float:
        """Nats of the noisy steps' x given their predecessors, for actions of `elements`; the noise decides it."""
        noisy = range(self._first, self.steps)
        each = sum(math.log(self._std(step)) + 0.5 + HALF_LOG_TWO_PI for step in noisy)
        return elements * (self.chunk * each + len(noisy) * self._log_volume)

    def transition(self, x: Tensor, v: Tensor, step: int) -> tuple[Tensor, float]:
        """Mean [n, K, A] and scale of x at τ = (step + 1)/T, given x and v(x) at τ = step/T."""
        time, rho = step / self.steps, self.correlation
        guess = x - time * v
        mixed = (1.0 - rho) * guess + rho * guess.sum(dim=1, keepdim=True)  # C · guess
        drift = v - self._sigma(step) ** 2 / (2.0 * (1.0 - time)) * mixed
        return x + drift / self.steps, self._std(step)

    @property
    def _first(self) -> int:
        """The first noisy step."""
        return max(0, self.steps - self.noisy) if self.noisy else 0

    def _sigma(self, step: int) -> float:
        """Of the step that begins at τ = step/T."""
        time = max(step, 1) / self.steps
        return self.eta * (math.sqrt((1.0 - time) / time) if time < 1.0 else 1.0)

    def _std(self, step: int) -> float:
        return self._sigma(step) * math.sqrt(1.0 / self.steps)

    def _logprob(self, white: Tensor, std: float) -> Tensor:
        """[n] of whitened noise [n, K, A]."""
        elements = white.shape[1] * white.shape[2]
        constant = elements * (math.log(std) + HALF_LOG_TWO_PI) + white.shape[2] * self._log_volume
        return -0.5 * white.flatten(1).square().sum(1) - constant

    @cached_property
    def _matrix(self) -> np.ndarray:
        """L [K, K]"""
        rho, K = self.correlation, self.chunk
        return np.linalg.cholesky((1.0 - rho) * np.eye(K) + rho * np.ones((K, K)))

    @cached_property
    def _log_volume(self) -> float:
        """log |L|"""
        return float(np.log(np.diag(self._matrix)).sum())

    def _colour(self, like: Tensor) -> Tensor:
        return torch.from_numpy(self._matrix).to(like)


def _time(x: Tensor, step: int, steps: int) -> Tensor:
    return x.new_full((len(x),), step / steps)
