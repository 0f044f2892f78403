"""What every engine does when weights are offered to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from cosmos_actor.roles.engine import HeldWeights, StaleWeights, WeightsRefused, WeightsSpoiled
from cosmos_actor.trainer.model_weights import WeightsDoNotFit, load_whole, weights_digest_of
from cosmos_actor.weight_plane.flat import digest_offered


def load_newer(model: torch.nn.Module, held: HeldWeights, tensors: Mapping[str, Any], version: int,
               digest: str) -> HeldWeights:
    """Copy all of `tensors` into `model` and say what it then holds, by the digest of its own tensors.

    All of them are checked against `digest`, where they lie, before the first is copied. Raises StaleWeights,
    WeightsSpoiled or WeightsRefused; the model is then as before.
    """
    check_offer(held, tensors, version, digest)
    with unfit_is_refused(version):
        load_whole(model, tensors)
    return HeldWeights(version, weights_digest_of(model))


def check_offer(held: HeldWeights, tensors: Mapping[str, Any], version: int, digest: str) -> None:
    """Raises StaleWeights unless `version` is newer than what is held, WeightsSpoiled unless `digest` is theirs."""
    if version <= held.version:
        raise StaleWeights(f"version {version} is not newer than {held.version}, which this engine holds")
    offered = digest_offered(tensors)
    if offered != digest:
        raise WeightsSpoiled(f"version {version} has digest {offered[:16]}, its manifest says {digest[:16]}")


@contextmanager
def unfit_is_refused(version: int) -> Iterator[None]:
    """WeightsDoNotFit becomes WeightsRefused, which names the version."""
    try:
        yield
    except WeightsDoNotFit as error:
        raise WeightsRefused(f"version {version}: {error}") from error
