"""A small vision-language-action policy: sees cameras, reads an instruction, draws chunks of actions by a flow.

    cameras ──convolutions──┐
    instruction ──words─────┼──> tokens ──blocks──> context ──┬──> flow head: (x, τ) ──> velocity
    state ──────────────────┘                                 └──> value

Legend: n rows, M tokens of the context, W its width, K actions of a chunk, A elements of an action (flattened),
T sampler steps. Actions are normalised by their own moments, which cloning gathers and nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.simulator_bridge.contract import DISCRETE, ActionSpec, ArraySpec
from cosmos_actor.trainer.control_settings import ControlSettings, FlowSettings
from cosmos_actor.trainer.flow import FlowSde, Velocity, matching_loss
from cosmos_actor.trainer.instructions import VOCABULARY
from cosmos_actor.trainer.observations import ObservationLayout, Seen
from cosmos_actor.trainer.running_moments import RunningMoments

STRIDES = 4
"""Halvings between pixels and tokens: 16 x 16 pixels are one."""
SMALLEST_SIDE = 1 << STRIDES
FIRST_CHANNELS = 32
TIMES, LONGEST_PERIOD = 64, 100.0
"""Sines and cosines that τ in [0, 1] is told by, and the longest of their periods over the shortest."""
SMALLEST_STD = 1e-3
"""An element of the actions that never moved in the data has no spread."""


class FlowDistribution(NamedTuple):
    """Of the chains of n rows."""

    model: VlaModel
    context: Tensor
    """[n, M, W]"""

    def log_prob(self, chains: Tensor) -> Tensor:
        """chains [n, (T+1)·K·A] -> [n], nats, given x_0."""
        shaped = chains.reshape(len(chains), *self.model.chain_shape)
        return self.model.sampler.logprob(self.model.velocity(self.context), shaped)

    def entropy(self) -> Tensor:
        """[n], nats; the sampler's noise decides it, so it has no gradient."""
        return self.context.new_full((len(self.context),), self.model.sampler.entropy(self.model.chain_shape[2]))


class VlaModel(nn.Module):
    """Weights are a function of settings, specs and seed. Moments are buffers, so they travel with them."""

    def __init__(self, settings: ControlSettings, observations: Mapping[str, ArraySpec], action: ActionSpec, *,
                 seed: int = 0) -> None:
        """Raises BadValue for actions that are no box, and for images that are too small."""
        super().__init__()
        if action.kind == DISCRETE:
            raise BadValue("a vla draws box actions, and those of this simulator are discrete",
                           setting="control.network.kind")
        flow = settings.flow
        self.layout = ObservationLayout(observations, kind="vla")
        self.action = action
        self.chain_shape = (flow.steps + 1, flow.chunk, math.prod(action.shape))
        """(T+1, K, A)"""
        self.sampler = FlowSde(flow.steps, flow.chunk, flow.eta, flow.correlation, flow.noisy_steps)
        normalise = settings.ppo.normalise_observations and self.layout.vector_width > 0
        self.seen_moments = RunningMoments(self.layout.vector_width) if normalise else None
        self.return_moments = RunningMoments(1) if settings.ppo.normalise_rewards else None
        self.action_moments = RunningMoments(self.chain_shape[2])
        self._shared = settings.network.shared
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.backbone = Backbone(flow, self.layout)
            self.head = FlowHead(flow, self.chain_shape[2])
            self.value_query = nn.Parameter(torch.randn(1, 1, flow.width) * 0.02)
            self.value_block = Block(flow.width, flow.heads, reads=True)
            self.value_head = nn.Sequential(nn.LayerNorm(flow.width), nn.Linear(flow.width, flow.width), nn.GELU(),
                                            nn.Linear(flow.width, 1))

    def context(self, seen: Seen) -> Tensor:
        """[n, M, W]"""
        vectors = seen.vectors if self.seen_moments is None else self.seen_moments(seen.vectors)
        return self.backbone(seen.images, seen.words, vectors)  # type: ignore[no-any-return]

    def values(self, context: Tensor, *, detached: bool = False) -> Tensor:
        """[n]. `detached`: their gradient stops at the context, as it always does where nothing is shared."""
        if detached or not self._shared:
            context = context.detach()
        query = self.value_query.expand(len(context), -1, -1)
        return self.value_head(self.value_block(query, context)[:, 0])[:, 0]  # type: ignore[no-any-return]

    def velocity(self, context: Tensor) -> Velocity:
        """Of x [n·r, K, A]: r rows for each of the context, next to each other."""

        def at(x: Tensor, time: Tensor) -> Tensor:
            repeats = len(x) // len(context)
            return self.head(x, time, context if repeats == 1 else  # type: ignore[no-any-return]
                             context.repeat_interleave(repeats, dim=0))

        return at

    def distribution(self, seen: Seen, *, detached: bool = False) -> tuple[FlowDistribution, Tensor]:
        """What the policy would draw, and values [n]."""
        context = self.context(seen)
        return FlowDistribution(self, context), self.values(context, detached=detached)

    def judging(self) -> list[Iterator[nn.Parameter]]:
        """What only the critic has."""
        return [iter([self.value_query]), self.value_block.parameters(), self.value_head.parameters()]

    @property
    def place(self) -> Tensor:
        """A tensor where all of the model's are."""
        return self.action_moments.mean

    def recorded(self, actions: Tensor) -> Tensor:
        """Chains as a fragment has them [n, T+1, K, A] -> [n, (T+1)·K·A]."""
        return actions.float().flatten(1)

    def normalised(self, actions: Tensor) -> Tensor:
        """A simulator's actions [n, K, A] as the flow draws them."""
        mean, std = self._moments()
        return (actions - mean) / std

    def commands(self, actions: Tensor) -> Tensor:
        """The flow's actions [n, K, A] as a simulator takes them, not yet cut to its bounds."""
        mean, std = self._moments()
        return actions * std + mean

    def cloning_loss(self, seen: Seen, actions: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
        """Flow matching on demonstrated chunks [n, K, A] in the simulator's units; mask [n, K], 1 where there is one.

        Gathers the moments of states and actions first.
        """
        if self.seen_moments is not None:
            self.seen_moments.include(seen.vectors.cpu().numpy())
        flat = actions.flatten(2)
        self.action_moments.include(flat[mask > 0].cpu().numpy())
        target = self.normalised(flat)
        noise = torch.randn(target.shape, generator=generator).to(target.device)
        time = torch.rand(len(target), generator=generator).to(target.device)
        losses = matching_loss(self.velocity(self.context(seen)), target, noise, time).mean(2)
        return (losses * mask).sum() / mask.sum().clamp(min=1.0)

    def _moments(self) -> tuple[Tensor, Tensor]:
        mean, scale = self.action_moments.shift_and_scale()
        return mean, (1.0 / scale).clamp(min=SMALLEST_STD)


class Backbone(nn.Module):
    """Everything that is seen, read and felt, as tokens that look at each other."""

    def __init__(self, flow: FlowSettings, layout: ObservationLayout) -> None:
        super().__init__()
        _, height, width = layout.image_shape
        if min(height, width) < SMALLEST_SIDE:
            raise BadValue(f"an image of {height} x {width} is too small for a vla ({SMALLEST_SIDE} x {SMALLEST_SIDE})",
                           setting="control.network.kind")
        self._channels = layout.channels
        self.eyes = nn.ModuleList(_eye(channels, flow.width) for channels in layout.channels)
        tokens = (-(-height // SMALLEST_SIDE)) * (-(-width // SMALLEST_SIDE)) * len(layout.channels)
        self.words = nn.Embedding(VOCABULARY, flow.width, padding_idx=0) if layout.words else None
        self.felt = nn.Linear(layout.vector_width, flow.width) if layout.vector_width else None
        tokens += layout.words + (self.felt is not None)
        self.places = nn.Parameter(torch.randn(1, tokens, flow.width) * 0.02)
        self.blocks = nn.ModuleList(Block(flow.width, flow.heads) for _ in range(flow.layers))
        self.norm = nn.LayerNorm(flow.width)

    def forward(self, images: Tensor, words: Tensor, vectors: Tensor) -> Tensor:
        """[n, M, W]"""
        pixels = images.float() / 127.5 - 1.0
        parts = [eye(part).flatten(2).transpose(1, 2)
                 for eye, part in zip(self.eyes, pixels.split(self._channels, dim=1), strict=True)]
        if self.words is not None:
            parts.append(self.words(words))
        if self.felt is not None:
            parts.append(self.felt(vectors)[:, None])
        tokens = torch.cat(parts, dim=1) + self.places
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens)  # type: ignore[no-any-return]


class FlowHead(nn.Module):
    """A chunk's actions look at each other and at the context."""

    def __init__(self, flow: FlowSettings, elements: int) -> None:
        super().__init__()
        self.enter = nn.Linear(elements, flow.width)
        self.places = nn.Parameter(torch.randn(1, flow.chunk, flow.width) * 0.02)
        self.time = nn.Sequential(nn.Linear(2 * TIMES, flow.width), nn.SiLU(), nn.Linear(flow.width, flow.width))
        self.blocks = nn.ModuleList(Block(flow.width, flow.heads, reads=True) for _ in range(flow.head_layers))
        self.norm = nn.LayerNorm(flow.width)
        self.leave = nn.Linear(flow.width, elements)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)
        periods = torch.logspace(0.0, math.log10(LONGEST_PERIOD), TIMES)
        self.register_buffer("rates", 2.0 * math.pi / (periods / LONGEST_PERIOD), persistent=False)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        """x [n, K, A], time [n], context [n, M, W] -> [n, K, A]"""
        phases = time[:, None] * self.rates
        told = self.time(torch.cat([phases.sin(), phases.cos()], dim=1))
        tokens = self.enter(x) + self.places + told[:, None]
        for block in self.blocks:
            tokens = block(tokens, context)
        return self.leave(self.norm(tokens))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer's, norms first; one that `reads` also attends to a context."""

    def __init__(self, width: int, heads: int, *, reads: bool = False) -> None:
        super().__init__()
        self._heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if reads else 2))
        self.mix_in, self.mix_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.read_query = nn.Linear(width, width) if reads else None
        self.read_in = nn.Linear(width, 2 * width) if reads else None
        self.read_out = nn.Linear(width, width) if reads else None
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        """[n, k, W], and of a context [n, M, W] -> [n, k, W]"""
        query, key, value = self.mix_in(self.norms[0](tokens)).chunk(3, dim=-1)
        tokens = tokens + self.mix_out(self._attend(query, key, value))
        if context is not None and self.read_query and self.read_in and self.read_out:
            key, value = self.read_in(context).chunk(2, dim=-1)
            tokens = tokens + self.read_out(self._attend(self.read_query(self.norms[2](tokens)), key, value))
        return tokens + self.narrow(functional.gelu(self.widen(self.norms[1](tokens))))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        apart = (part.unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in (query, key, value))
        return functional.scaled_dot_product_attention(*apart).transpose(1, 2).flatten(2)


def _eye(channels: int, width: int) -> nn.Sequential:
    """[n, C, H, W'] -> [n, W, H/16, W'/16]"""
    layers: list[nn.Module] = []
    for stage in range(STRIDES):
        out = width if stage == STRIDES - 1 else min(width, FIRST_CHANNELS << stage)
        layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1), nn.GroupNorm(math.gcd(8, out), out), nn.SiLU(),
                   nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(math.gcd(8, out), out), nn.SiLU()]
        channels = out
    return nn.Sequential(*layers)


def shifted(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Each image [n, C, H, W] moved by up to `most` pixels each way, its edge repeated (Yarats et al. 2021, DrQ-v2)."""
    if most == 0:
        return images
    rows, _, height, width = images.shape
    moves = torch.randint(0, 2 * most + 1, (rows, 2), generator=generator).to(images.device)
    padded = functional.pad(images.float(), (most,) * 4, mode="replicate").to(images.dtype)
    down = (moves[:, :1] + torch.arange(height, device=images.device))[:, None, :, None]
    right = (moves[:, 1:] + torch.arange(width, device=images.device))[:, None, None, :]
    at = torch.arange(rows, device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return padded[at, channels, down, right]
