"""The engine that acts: one control model, one version of the weights at a time.

Legend: n rows, one for each slot of a simulator that waits for an action; K actions of a discrete spec, A elements of
a box action (flattened).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from cosmos_actor.roles.control_forward import NumpyForward, make_forward
from cosmos_actor.roles.engine import HeldWeights
from cosmos_actor.roles.newer_weights import load_newer
from cosmos_actor.simulator_bridge.contract import DISCRETE, ActionSpec, ArraySpec
from cosmos_actor.trainer.control_model import ControlModel
from cosmos_actor.trainer.control_settings import ControlSettings
from cosmos_actor.trainer.models import use_threads
from cosmos_actor.trainer.world import choose_device

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class ControlEngine:
    """Guarantee: actions are a function of the observations, the noise and the weights held, nothing else."""

    def __init__(self, settings: ControlSettings, observations: Mapping[str, ArraySpec], action: ActionSpec) -> None:
        self.held = HeldWeights(version=-1, digest="")
        self.action = action
        self.model = ControlModel(settings, observations, action).to(choose_device(settings.device))
        self.model.eval().requires_grad_(False)
        self._threads = settings.threads
        self._forward = make_forward(self.model)
        self.quick = isinstance(self._forward, NumpyForward)
        """Whether an act takes so short that it need not leave the thread that asks."""
        self._read_log_std()
        self._counts = {"acts": 0.0, "rows": 0.0, "seconds": 0.0, "swaps": 0.0}

    def noise(self, generator: np.random.Generator, rows: int) -> np.ndarray:
        """What `rows` actions are drawn with: [n] uniform in [0, 1), or [n, A] normal float32.

        Drawn by whoever asks for the actions, so that they do not depend on with whom they are computed.
        """
        if self.action.kind == DISCRETE:
            return generator.random(rows)
        return generator.standard_normal((rows, self._log_std.size), dtype=np.float32)

    def act(self, observations: Mapping[str, np.ndarray], noise: np.ndarray | None
            ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Name -> [n, …] to actions ([n] int64, or [n, …] float32), log-probs [n] float32 and values [n] float32.

        Without noise the likeliest action is taken, and scored as any other. A box action is as drawn, also
        out of bounds: train on it, and send `within_bounds` of it to the simulator.
        """
        started = time.perf_counter()
        use_threads(self._threads)
        outputs, values = self._forward.policy_and_values(self.model.layout(observations))
        if self.action.kind == DISCRETE:
            actions, logprobs = choose(outputs, noise)
        else:
            actions, logprobs = perturb(outputs, self._log_std, noise)
            actions = actions.reshape(len(actions), *self.action.shape)
        self._counts["acts"] += 1
        self._counts["rows"] += len(outputs)
        self._counts["seconds"] += time.perf_counter() - started
        return actions, logprobs, values

    def commands(self, actions: np.ndarray) -> np.ndarray:
        """What a simulator is told to do for these actions."""
        return within_bounds(actions, self.action)

    def values(self, observations: Mapping[str, np.ndarray]) -> np.ndarray:
        """Name -> [n, …] to [n] float32: what `act` says of the same observations."""
        use_threads(self._threads)
        return self._forward.values(self.model.layout(observations))

    def load_weights(self, tensors: Mapping[str, np.ndarray], version: int, digest: str) -> str:
        """See RolloutEngine.load_weights."""
        self.held = load_newer(self.model, self.held, tensors, version, digest)
        self._forward.weights_changed()
        self._read_log_std()
        self._counts["swaps"] += 1
        return self.held.digest

    def statistics(self) -> dict[str, float]:
        """Counts since the start: acts, rows acted for, seconds acting, swaps."""
        return dict(self._counts)

    def _read_log_std(self) -> None:
        log_std = self.model.log_std
        self._log_std = np.zeros(0, np.float32) if log_std is None else log_std.detach().cpu().numpy().copy()


def choose(logits: np.ndarray, uniform: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """logits [n, K] float32, uniform [n] float64 in [0, 1) -> actions [n] int64, their log-probs [n] float32.

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
