"""How actions are drawn from a control model, by noise that whoever asks brings along.

Legend as in `control_engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from cosmos_actor.roles.control_forward import NumpyForward, make_forward
from cosmos_actor.simulator_bridge.contract import DISCRETE, ActionSpec
from cosmos_actor.trainer.control_model import ControlModel
from cosmos_actor.trainer.flow import HALF_LOG_TWO_PI, likeliest_chain
from cosmos_actor.trainer.observations import Seen
from cosmos_actor.trainer.vla_model import VlaModel


class Drawing(Protocol):
    """One kind of policy. Computes with the weights that its model holds at the time of the call."""

    quick: bool
    """See `ControlEngine.quick`."""

    def noise(self, generator: np.random.Generator, rows: int) -> np.ndarray: ...

    def start(self, generators: Sequence[np.random.Generator]) -> np.ndarray | None:
        """What the likeliest actions of n rows are found from, one generator a row; None where nothing is drawn."""
        ...

    def draw(self, seen: Seen, noise: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(actions as a fragment has them, log-probs [n] float32, values [n] float32)"""
        ...

    def commands(self, actions: np.ndarray) -> np.ndarray: ...

    def values(self, seen: Seen) -> np.ndarray: ...

    def weights_changed(self) -> None:
        """To be called after every change of the model."""
        ...


class SingleDrawing:
    """One action at a time, categorical or Gaussian."""

    def __init__(self, model: ControlModel) -> None:
        self._model, self._forward = model, make_forward(model)
        self.quick = isinstance(self._forward, NumpyForward)
        self._read_log_std()

    def noise(self, generator: np.random.Generator, rows: int) -> np.ndarray:
        if self._model.action.kind == DISCRETE:
            return generator.random(rows)
        return generator.standard_normal((rows, self._log_std.size), dtype=np.float32)

    def start(self, generators: Sequence[np.random.Generator]) -> None:
        return None

    def draw(self, seen: Seen, noise: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        outputs, values = self._forward.policy_and_values(seen)
        if self._model.action.kind == DISCRETE:
            return (*choose(outputs, noise), values)
        actions, logprobs = perturb(outputs, self._log_std, noise)
        return actions.reshape(len(actions), *self._model.action.shape), logprobs, values

    def commands(self, actions: np.ndarray) -> np.ndarray:
        return within_bounds(actions, self._model.action)[:, None]

    def values(self, seen: Seen) -> np.ndarray:
        return self._forward.values(seen)

    def weights_changed(self) -> None:
        self._forward.weights_changed()
        self._read_log_std()

    def _read_log_std(self) -> None:
        log_std = self._model.log_std
        self._log_std = np.zeros(0, np.float32) if log_std is None else log_std.detach().cpu().numpy().copy()


class ChunkDrawing:
    """Chunks by a flow. What a fragment has is the whole chain: only of that is the likelihood known."""

    quick = False

    def __init__(self, model: VlaModel) -> None:
        self._model = model

    def noise(self, generator: np.random.Generator, rows: int) -> np.ndarray:
        return generator.standard_normal((rows, *self._model.chain_shape), dtype=np.float32)

    def start(self, generators: Sequence[np.random.Generator]) -> np.ndarray:
        """x_0 [n, K, A]. Drawn, since a flow was never shown the middle of the noise: x_0 = 0 is like no draw."""
        shape = self._model.chain_shape[1:]
        return np.stack([generator.standard_normal(shape, dtype=np.float32) for generator in generators])

    @torch.inference_mode()
    def draw(self, seen: Seen, noise: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """With x_0 [n, K, A] alone: the ODE from there. Without noise: from one x_0, the same for all."""
        model, device = self._model, self._model.place.device
        context = model.context(seen.to(device))
        velocity = model.velocity(context)
        if noise is None:
            noise = self.start([np.random.default_rng(0)]).repeat(len(context), axis=0)
        if noise.ndim < 1 + len(model.chain_shape):
            chain = likeliest_chain(velocity, torch.from_numpy(noise).to(device), model.sampler.steps)
            logprobs = model.sampler.logprob(velocity, chain)
        else:
            chain, logprobs = model.sampler.draw(velocity, torch.from_numpy(noise).to(device))
        return chain.cpu().numpy(), logprobs.cpu().numpy(), model.values(context).cpu().numpy()

    @torch.inference_mode()
    def commands(self, actions: np.ndarray) -> np.ndarray:
        model = self._model
        last = torch.from_numpy(np.ascontiguousarray(actions[:, -1])).to(model.place.device)
        chunks = model.commands(last).cpu().numpy()
        return within_bounds(chunks.reshape(*chunks.shape[:2], *model.action.shape), model.action)

    @torch.inference_mode()
    def values(self, seen: Seen) -> np.ndarray:
        model = self._model
        context = model.context(seen.to(model.place.device))
        return model.values(context).cpu().numpy()  # type: ignore[no-any-return]

    def weights_changed(self) -> None: ...


def choose(logits: np.ndarray, uniform: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """logits [n, N] float32, uniform [n] float64 in [0, 1) -> actions [n] int64, their log-probs [n] float32.

    The action is the first whose cumulative probability passes `uniform`; the likeliest where there is none.
    """
    logprobs = logits - logits.max(axis=1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
    if uniform is None:
        actions = logits.argmax(axis=1)
    else:
        cumulative = np.exp(logprobs, dtype=np.float64).cumsum(axis=1)
        total = cumulative[:, -1]
        reached = np.minimum(uniform * total, np.nextafter(total, 0.0))
        actions = (cumulative <= reached[:, None]).sum(axis=1)
    return actions, logprobs[np.arange(len(actions)), actions]


def perturb(means: np.ndarray, log_std: np.ndarray, normal: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """means, normal [n, A], log_std [A], float32 -> actions [n, A] and their log-probs [n]; the means without normal.

        action = mean + std·normal          log p = -Σ_a (½·normal² + log std + ½·log 2π)
    """
    constant = -float(log_std.sum()) - means.shape[1] * HALF_LOG_TWO_PI
    if normal is None:
        return means, np.full(len(means), constant, np.float32)
    return means + np.exp(log_std) * normal, (constant - 0.5 * np.square(normal).sum(axis=1)).astype(np.float32)


def within_bounds(actions: np.ndarray, spec: ActionSpec) -> np.ndarray:
    """What a simulator is told: box actions [n, …] float32 cut to [low, high], discrete ones as they are."""
    if spec.kind == DISCRETE or not (spec.low or spec.high):
        return actions
    low = np.array(spec.low, np.float32).reshape(spec.shape) if spec.low else None
    high = np.array(spec.high, np.float32).reshape(spec.shape) if spec.high else None
    return np.clip(actions, low, high)
