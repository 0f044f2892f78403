"""Actor and critic for control.

Legend: n rows, D numbers seen, C x H x W pixels, K actions of a discrete spec, A elements of a box action (flattened).
Weights are drawn as cleanRL draws them: orthogonal, gain √2; 0.01 in the policy's last layer, 1 in the value's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.simulator_bridge.contract import DISCRETE, ActionSpec, ArraySpec
from cosmos_actor.trainer.control_settings import ControlSettings, NetworkSettings
from cosmos_actor.trainer.flow import HALF_LOG_TWO_PI
from cosmos_actor.trainer.observations import ObservationLayout, Seen
from cosmos_actor.trainer.running_moments import RunningMoments

INNER_GAIN, POLICY_GAIN, VALUE_GAIN = math.sqrt(2.0), 0.01, 1.0
"""A policy's small last layer: every action is likely at first."""
CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""(channels, kernel, stride) of Mnih et al. 2015."""


class Distribution(Protocol):
    """Of the actions of n rows."""

    def log_prob(self, actions: Tensor) -> Tensor:
        """[n], nats."""
        ...

    def entropy(self) -> Tensor:
        """[n], nats."""
        ...


class Categorical(NamedTuple):
    """logprobs: [n, K], normalised."""

    logprobs: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        """actions: [n] int64."""
        return self.logprobs.gather(1, actions[:, None])[:, 0]

    def entropy(self) -> Tensor:
        return -(self.logprobs.exp() * self.logprobs).sum(1)


class DiagonalGaussian(NamedTuple):
    """mean: [n, A], log_std: [A]."""

    mean: Tensor
    log_std: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        """actions: [n, A] float32, as drawn: what a simulator makes of one out of bounds is not the policy's."""
        distance = (actions - self.mean) * (-self.log_std).exp()
        return -(0.5 * distance.square() + self.log_std + HALF_LOG_TWO_PI).sum(1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 + HALF_LOG_TWO_PI).sum().expand(len(self.mean))


class ControlModel(nn.Module):
    """Weights are a function of settings, specs and seed. Running moments are buffers, so they travel with them."""

    def __init__(self, settings: ControlSettings, observations: Mapping[str, ArraySpec], action: ActionSpec, *,
                 seed: int = 0) -> None:
        super().__init__()
        network = settings.network
        self.layout = ObservationLayout(observations, kind=network.kind)
        self.action = action
        normalise = settings.ppo.normalise_observations and self.layout.vector_width > 0
        self.seen_moments = RunningMoments(self.layout.vector_width) if normalise else None
        self.return_moments = RunningMoments(1) if settings.ppo.normalise_rewards else None
        outputs = action.n if action.kind == DISCRETE else math.prod(action.shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = Trunk(network, self.layout)
            self.critic = None if network.shared else Trunk(network, self.layout)
            self.policy_head = _drawn(nn.Linear(network.hidden[-1], outputs), POLICY_GAIN)
            self.value_head = _drawn(nn.Linear(network.hidden[-1], 1), VALUE_GAIN)
        self.log_std = None if action.kind == DISCRETE else nn.Parameter(torch.zeros(outputs))

    def forward(self, seen: Seen, *, detached: bool = False) -> tuple[Tensor, Tensor]:
        """Logits [n, K] or means [n, A], and values [n]. `detached`: values teach shared layers nothing."""
        vectors = seen.vectors if self.seen_moments is None else self.seen_moments(seen.vectors)
        acts = self.actor(vectors, seen.images)
        if self.critic is not None:
            judges = self.critic(vectors, seen.images)
        else:
            judges = acts.detach() if detached else acts
        return self.policy_head(acts), self.value_head(judges)[:, 0]

    def distribution(self, seen: Seen, *, detached: bool = False) -> tuple[Distribution, Tensor]:
        """What the policy would do, and values [n]."""
        outputs, values = self(seen, detached=detached)
        if self.log_std is None:
            return Categorical(torch.log_softmax(outputs, dim=1)), values
        return DiagonalGaussian(outputs, self.log_std), values

    def judging(self) -> list[Iterator[nn.Parameter]]:
        """What only the critic has."""
        return [part.parameters() for part in (self.critic, self.value_head) if part is not None]

    @property
    def place(self) -> Tensor:
        """A tensor where all of the model's are."""
        return self.value_head.weight

    def recorded(self, actions: Tensor) -> Tensor:
        """Actions as a fragment has them -> [n] int64, or [n, A] float32."""
        return actions.long() if self.log_std is None else actions.float().flatten(1)

    def cloning_loss(self, seen: Seen, actions: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
        """-log-prob of demonstrated actions [n, 1, …]; mask [n, 1]. Gathers the moments of what is seen first."""
        if self.seen_moments is not None:
            self.seen_moments.include(seen.vectors.cpu().numpy())
        policy, _ = self.distribution(seen)
        return -(policy.log_prob(self.recorded(actions[:, 0])) * mask[:, 0]).sum() / mask[:, 0].sum().clamp(min=1.0)


class Trunk(nn.Module):
    """Convolutions, if there are images, then dense layers over their features and the vectors."""

    def __init__(self, network: NetworkSettings, layout: ObservationLayout) -> None:
        super().__init__()
        self.pictures = _convolutions(layout.image_shape) if network.kind == "cnn" else None
        width = layout.vector_width + (0 if self.pictures is None else _features(self.pictures, layout.image_shape))
        layers: list[nn.Module] = []
        for hidden in network.hidden:
            layers += [_drawn(nn.Linear(width, hidden), INNER_GAIN), nn.Tanh() if network.activation == "tanh"
                       else nn.ReLU()]
            width = hidden
        self.dense = nn.Sequential(*layers)

    def forward(self, vectors: Tensor, images: Tensor) -> Tensor:
        """[n, hidden[-1]]"""
        if self.pictures is not None:
            vectors = torch.cat([self.pictures(images.float() / 255.0), vectors], dim=1)
        return self.dense(vectors)  # type: ignore[no-any-return]


def _convolutions(shape: tuple[int, int, int]) -> nn.Sequential:
    """Raises BadValue for an image that is smaller than their reach."""
    layers: list[nn.Module] = []
    channels, *size = shape
    for width, kernel, stride in CONVOLUTIONS:
        if min(size) < kernel:
            raise BadValue(f"an image of {shape[1]} x {shape[2]} is too small for the convolutions (36 x 36)",
                           setting="control.network.kind")
        layers += [_drawn(nn.Conv2d(channels, width, kernel, stride), INNER_GAIN), nn.ReLU()]
        channels, size = width, [(length - kernel) // stride + 1 for length in size]
    return nn.Sequential(*layers, nn.Flatten())


def _features(pictures: nn.Sequential, shape: tuple[int, int, int]) -> int:
    with torch.no_grad():
        return pictures(torch.zeros(1, *shape)).shape[1]


def _drawn(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Linear | nn.Conv2d:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer
