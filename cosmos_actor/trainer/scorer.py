"""Log-probs under a frozen model: the reference of the KL term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_actor.actors.trajectory import TrajectoryGroup
from cosmos_actor.trainer.adapter import load_served_model
from cosmos_actor.trainer.batch import batch_from_groups, ragged
from cosmos_actor.trainer.forward import score_batch
from cosmos_actor.trainer.model_weights import WeightsDoNotFit, load_whole, weights_digest_of
from cosmos_actor.trainer.models import DTYPES, use_threads
from cosmos_actor.trainer.settings import TrainerSettings
from cosmos_actor.trainer.world import choose_device
from cosmos_actor.weight_plane.flat import digest_offered


class Scorer:
    """Scores with the same forward pass as the trainer, so that equal weights give a KL of exactly zero on one machine.

    Holds the published dtype, as an engine does.
    """

    def __init__(
        self, settings: TrainerSettings, *, temperature: float = 1.0, device: str | None = None,
        threads: int | None = None,
    ) -> None:
        """`device` and `threads` where they are not the policy's."""
        self._threads = threads or settings.threads
        self.settings, self.temperature = settings, temperature or 1.0
        self.held: tuple[int, str] = (-1, "")
        place = choose_device(device or settings.device)
        self.model = load_served_model(settings, place).requires_grad_(False)
        cast = settings.publish_dtype == "float32" and settings.dtype != "float32"
        self._autocast = DTYPES[settings.dtype] if cast else None

    def load_weights(self, tensors: Mapping[str, Any], version: int, digest: str) -> str:
        """Swap in all of `tensors` or none; the digest of what is then held. Raises WeightsDoNotFit."""
        offered = digest_offered(tensors)
        if offered != digest:
            raise WeightsDoNotFit(f"version {version} has digest {offered[:16]}, its manifest says {digest[:16]}")
        load_whole(self.model, tensors)
        self.held = (version, weights_digest_of(self.model))
        return self.held[1]

    def logprobs(self, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
        """The log-probs of the sampled tokens: one [N] float32 a group."""
        use_threads(self._threads)
        batch = batch_from_groups(groups)
        values = score_batch(
            self.model, batch, temperature=self.temperature, max_tokens=self.settings.micro_batch_tokens,
            autocast=self._autocast,
        )
        return ragged(batch, values, groups)
