"""A forward pass of a control model: torch's, or for small dense networks numpy's, which starts in a third of the time.

Both give logits [n, K] or means [n, A], and values [n], float32, equal to 1e-5 of each other. Half of an act of a
64 x 64 network with torch is the start of its twenty operations; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import nn

from cosmos_actor.trainer.control_model import ControlModel, Trunk
from cosmos_actor.trainer.observations import Seen
from cosmos_actor.trainer.running_moments import CLIP, RunningMoments

Dense = list[tuple[np.ndarray, np.ndarray]]
"""(weight [in, out], bias [out]) of each layer, the very memory that the model's tensors have."""
NUMPY_WIDTH = 256
"""The widest layer that numpy computes; above it the products outweigh the starts, and torch has the faster ones."""


class Forward(Protocol):
    """Computes with the weights that the model holds at the time of the call."""

    def policy_and_values(self, seen: Seen) -> tuple[np.ndarray, np.ndarray]: ...

    def values(self, seen: Seen) -> np.ndarray: ...

    def weights_changed(self) -> None:
        """To be called after every change of the model."""
        ...


def make_forward(model: ControlModel) -> Forward:
    """The faster of the two for this model where it is."""
    small = max(layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear)) <= NUMPY_WIDTH
    on_host = model.place.device.type == "cpu"
    return NumpyForward(model) if small and on_host and model.actor.pictures is None else TorchForward(model)


class TorchForward:
    """Any model, on any device."""

    def __init__(self, model: ControlModel) -> None:
        self._model = model

    @torch.inference_mode()
    def policy_and_values(self, seen: Seen) -> tuple[np.ndarray, np.ndarray]:
        outputs, values = self._model(seen.to(self._model.place.device))
        return outputs.cpu().numpy(), values.cpu().numpy()

    def values(self, seen: Seen) -> np.ndarray:
        return self.policy_and_values(seen)[1]

    def weights_changed(self) -> None: ...


class NumpyForward:
    """Dense layers only, on the host."""

    def __init__(self, model: ControlModel) -> None:
        self._moments = model.seen_moments
        self._actor = _dense(model.actor)
        self._critic = None if model.critic is None else _dense(model.critic)
        self._policy_head, self._value_head = _arrays(model.policy_head), _arrays(model.value_head)
        self._activate = _activation(model.actor)
        self.weights_changed()

    def policy_and_values(self, seen: Seen) -> tuple[np.ndarray, np.ndarray]:
        vectors = self._normalised(seen.vectors)
        acts = self._through(self._actor, vectors)
        judges = acts if self._critic is None else self._through(self._critic, vectors)
        return _linear(acts, self._policy_head), _linear(judges, self._value_head)[:, 0]

    def values(self, seen: Seen) -> np.ndarray:
        layers = self._actor if self._critic is None else self._critic
        return _linear(self._through(layers, self._normalised(seen.vectors)), self._value_head)[:, 0]

    def weights_changed(self) -> None:
        self._shift_and_scale = None if self._moments is None else _host_moments(self._moments)

    def _normalised(self, vectors: np.ndarray) -> np.ndarray:
        if self._shift_and_scale is None:
            return vectors
        shift, scale = self._shift_and_scale
        normalised = (vectors - shift) * scale
        return np.minimum(np.maximum(normalised, -CLIP, out=normalised), CLIP, out=normalised)

    def _through(self, layers: Dense, vectors: np.ndarray) -> np.ndarray:
        for layer in layers:
            vectors = _linear(vectors, layer)
            self._activate(vectors)
        return vectors


def _dense(trunk: Trunk) -> Dense:
    return [_arrays(layer) for layer in trunk.dense if isinstance(layer, nn.Linear)]


def _arrays(layer: nn.Linear) -> tuple[np.ndarray, np.ndarray]:
    return layer.weight.detach().numpy().T, layer.bias.detach().numpy()


def _linear(rows: np.ndarray, layer: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    result = rows @ layer[0]
    result += layer[1]
    return result


def _activation(trunk: Trunk) -> Callable[[np.ndarray], object]:
    """Changes its argument."""
    if isinstance(trunk.dense[1], nn.Tanh):
        return lambda rows: np.tanh(rows, out=rows)
    return lambda rows: np.maximum(rows, 0.0, out=rows)


def _host_moments(moments: RunningMoments) -> tuple[np.ndarray, np.ndarray]:
    shift, scale = moments.shift_and_scale()
    return shift.numpy(), scale.numpy()
