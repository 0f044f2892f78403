"""Rollouts that compute with less than they were sent: fp8 weights, and how far they are from those of the version.

A version is named by the digest of what was sent, compared before anything is rounded. What is held then is made of it,
and other bytes; `Made` knows both, so reading back still proves that the version is the one that acts.

Legend: O outputs and I inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from cosmos_actor.roles.rounding import PREFIX

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
"""448."""


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    """[O, I] of the same dtype: each output's row divided so that its largest element is 448, rounded to e4m3, and
    multiplied again (Micikevicius et al. 2022). A row of zeros stays one."""
    scale = matrix.float().abs().amax(dim=1, keepdim=True) / LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return ((matrix.float() / scale).to(E4M3).float() * scale).to(matrix.dtype)


@dataclass(frozen=True)
class Distance:
    """Of the weights held from those sent, over all layers of one kind, such as q_proj."""

    rms: float
    """Root of the squared differences' sum over that of what was sent."""
    largest: float
    """Largest difference over the largest element of its own tensor."""


def distances(pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> dict[str, Distance]:
    """Kind -> distance, of (name, sent, held) of the tensors that were rounded. The host waits for a device once."""
    sums: dict[str, list[torch.Tensor]] = {}
    for name, sent, held in pairs:
        right = sent.to(held.device).float()
        off = held.float() - right
        found = torch.stack([off.square().sum(), right.square().sum(), off.abs().max() / right.abs().max()])
        sums.setdefault(kind_of(name), []).append(found)
    every = {kind: torch.stack(found) for kind, found in sums.items()}
    table = {kind: (found[:, :2].sum(0), found[:, 2].nan_to_num().max()) for kind, found in every.items()}
    if not table:
        return {}
    flat = torch.stack([torch.stack([both[0] / both[1], largest]) for both, largest in table.values()]).cpu().tolist()
    return {kind: Distance(float(square) ** 0.5, float(largest))
            for kind, (square, largest) in zip(table, flat, strict=True)}


def kind_of(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def statistics_of(found: Mapping[str, Distance]) -> dict[str, float]:
    """Names as in an engine's statistics."""
    return {f"{PREFIX}{kind}/{what}": value for kind, one in found.items()
            for what, value in (("rms", one.rms), ("max", one.largest))}


def quantised_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """(name of the matrix, layer) of the linear layers whose matrix is theirs alone, the output head excepted: what
    vLLM rounds, too."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            yield f"{name}.weight", module


@torch.no_grad()
def round_layers(model: torch.nn.Module) -> dict[str, Distance]:
    """Round the matrices of `model` where they are; how far they went."""
    return distances(_round_each(model))


def _round_each(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for name, layer in quantised_layers(model):
        sent = layer.weight.detach().clone()
        layer.weight.copy_(rounded(sent))
        yield name, sent, layer.weight.detach()


@dataclass(frozen=True)
class Made:
    """What an engine holds and what it was made of."""

    sent: str
    """The version's digest."""
    held: str
    """The digest of the rounded weights, right after they were made."""

    def name(self, held_now: str) -> str:
        """The version's digest while what is held is what was made of it; then that of what is held."""
        return self.sent if held_now == self.held else held_now
