"""What every engine does when weights are offered to it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from cosmos_actor.roles.engine import HeldWeights, StaleWeights, WeightsRefused
from cosmos_actor.trainer.model_weights import WeightsDoNotFit, load_whole, weights_digest_of
from cosmos_actor.weight_plane.digest import weights_digest


def load_newer(model: torch.nn.Module, held: HeldWeights, tensors: Mapping[str, np.ndarray], version: int,
               digest: str) -> HeldWeights:
    """Copy all of `tensors` into `model` and say what it then holds, by the digest of its own tensors.

    All arrays are checked against `digest` before the first is copied. Raises StaleWeights or WeightsRefused; the model
    is then as before.
    """
    if version <= held.version:
        raise StaleWeights(f"version {version} is not newer than {held.version}, which this engine holds")
    offered = weights_digest(tensors)
    if offered != digest:
        raise WeightsRefused(f"version {version} has digest {offered[:16]}, its manifest says {digest[:16]}")
    try:
        load_whole(model, tensors)
    except WeightsDoNotFit as error:
        raise WeightsRefused(f"version {version}: {error}") from error
    return HeldWeights(version, weights_digest_of(model))
