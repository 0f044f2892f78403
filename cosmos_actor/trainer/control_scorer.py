"""Log-probs and values of steps that were taken, under the weights that a model holds now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch

from cosmos_actor.simulator_bridge.contract import ActionSpec, ArraySpec
from cosmos_actor.trainer.control_model import ControlModel
from cosmos_actor.trainer.control_settings import ControlSettings
from cosmos_actor.trainer.models import use_threads
from cosmos_actor.trainer.observations import Seen
from cosmos_actor.trainer.vla_model import VlaModel

ROWS = 1024
"""Steps of one forward pass: bounds the memory of activations of images."""
Model = ControlModel | VlaModel


def make_model(settings: ControlSettings, observations: Mapping[str, ArraySpec], action: ActionSpec, seed: int = 0
               ) -> Model:
    """The network that `control.network.kind` names. Raises BadValue where it does not fit the simulator."""
    kind = VlaModel if settings.network.kind == "vla" else ControlModel
    return cast(Model, kind(settings, observations, action, seed=seed))


class ControlScorer:
    """Of one model. Legend: S steps."""

    def __init__(self, model: Model, threads: int) -> None:
        self.model, self._threads = model, threads
        self._device = model.place.device

    def seen(self, observations: Mapping[str, np.ndarray]) -> Seen:
        """Arrays [S, …] by name, where the model is."""
        return self.model.layout(observations).to(self._device)

    def recorded(self, actions: np.ndarray) -> torch.Tensor:
        """Actions [S, …] as fragments have them, as the model's distributions take them."""
        return self.model.recorded(torch.from_numpy(np.ascontiguousarray(actions)).to(self._device))

    def score(self, observations: Mapping[str, np.ndarray], actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs and values [S] float32."""
        return self.score_tensors(self.seen(observations), self.recorded(actions))

    @torch.no_grad()
    def score_tensors(self, seen: Seen, actions: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The same of what is there already."""
        use_threads(self._threads)
        parts = []
        for part in _parts(len(actions)):
            policy, values = self.model.distribution(seen.rows(part))
            parts.append(torch.stack([policy.log_prob(actions[part]), values]))
        logprobs, values = torch.cat(parts, dim=1).cpu().numpy()
        return logprobs, values

    @torch.no_grad()
    def values(self, observations: Mapping[str, np.ndarray]) -> np.ndarray:
        """[S] float32."""
        use_threads(self._threads)
        seen = self.seen(observations)
        parts = [self.model.distribution(seen.rows(part))[1] for part in _parts(len(seen.vectors))]
        return torch.cat(parts).cpu().numpy()


def _parts(rows: int) -> list[slice]:
    return [slice(start, start + ROWS) for start in range(0, rows, ROWS)]
