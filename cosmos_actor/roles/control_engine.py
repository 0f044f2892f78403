"""The engine that acts: one control model, one version of the weights at a time.

Legend: n rows, one for each slot of a simulator that waits for an action; K actions of a chunk, N of a discrete spec, A
elements of a box action (flattened); T steps of a flow's sampler.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from cosmos_actor.roles.drawing import ChunkDrawing, Drawing, SingleDrawing
from cosmos_actor.roles.engine import HeldWeights
from cosmos_actor.roles.newer_weights import load_newer
from cosmos_actor.simulator_bridge.contract import ActionSpec, ArraySpec
from cosmos_actor.trainer.control_scorer import make_model
from cosmos_actor.trainer.control_settings import ControlSettings
from cosmos_actor.trainer.model_weights import weights_digest_of
from cosmos_actor.trainer.models import use_threads
from cosmos_actor.trainer.vla_model import VlaModel
from cosmos_actor.trainer.world import choose_device


class ControlEngine:
    """Guarantee: actions are a function of the observations, the noise and the weights held, nothing else."""

    def __init__(self, settings: ControlSettings, observations: Mapping[str, ArraySpec], action: ActionSpec) -> None:
        self.held = HeldWeights(version=-1, digest="")
        self.model = make_model(settings, observations, action).to(choose_device(settings.device))
        self.model.eval().requires_grad_(False)
        self._threads = settings.threads
        self._drawing: Drawing = (
            ChunkDrawing(self.model) if isinstance(self.model, VlaModel) else SingleDrawing(self.model))
        self.quick = self._drawing.quick
        """Whether an act takes so short that it need not leave the thread that asks."""
        self._counts = {"acts": 0.0, "rows": 0.0, "seconds": 0.0, "swaps": 0.0}

    def noise(self, generator: np.random.Generator, rows: int) -> np.ndarray:
        """What `rows` actions are drawn with: [n] uniform in [0, 1), [n, A] normal float32, or [n, T+1, K, A] of a
        flow.

        Drawn by whoever asks for the actions, so that they do not depend on with whom they are computed.
        """
        return self._drawing.noise(generator, rows)

    def start(self, keys: Sequence[Sequence[int]]) -> np.ndarray | None:
        """What the likeliest actions of n rows are found from, for `act`: a function of the rows' keys alone."""
        return self._drawing.start([np.random.default_rng(key) for key in keys])

    def act(self, observations: Mapping[str, np.ndarray], noise: np.ndarray | None
            ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Name -> [n, …] to actions ([n] int64, [n, …] float32, or chains [n, T+1, K, A]), log-probs and values [n].

        Without noise, or with what `start` gave, the likeliest action is taken, and scored as any other. A box action
        is as drawn, also out of bounds: train on it, and send `commands` of it to the simulator.
        """
        started = time.perf_counter()
        use_threads(self._threads)
        actions, logprobs, values = self._drawing.draw(self.model.layout(observations), noise)
        self._counts["acts"] += 1
        self._counts["rows"] += len(actions)
        self._counts["seconds"] += time.perf_counter() - started
        return actions, logprobs, values

    def commands(self, actions: np.ndarray) -> np.ndarray:
        """What a simulator is told to do for these actions: chunks [n, K, …]."""
        return self._drawing.commands(actions)

    def values(self, observations: Mapping[str, np.ndarray]) -> np.ndarray:
        """Name -> [n, …] to [n] float32: what `act` says of the same observations."""
        use_threads(self._threads)
        return self._drawing.values(self.model.layout(observations))

    def load_weights(self, tensors: Mapping[str, np.ndarray], version: int, digest: str) -> str:
        """See RolloutEngine.load_weights."""
        self.held = load_newer(self.model, self.held, tensors, version, digest)
        self._drawing.weights_changed()
        self._counts["swaps"] += 1
        return self.held.digest

    def read_back(self) -> str:
        """See RolloutEngine.read_back."""
        return weights_digest_of(self.model)

    def statistics(self) -> dict[str, float]:
        """Counts since the start: acts, rows acted for, seconds acting, swaps."""
        return dict(self._counts)
