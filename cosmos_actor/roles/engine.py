"""What a rollout role asks of an engine. Nothing here knows torch or vLLM.

Legend: P tokens of a prompt, T tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cosmos_actor.roles.sampling import SamplingSettings


class EngineError(Exception):
    """An engine could not do what it was asked; what it held before, it still holds."""


class WeightsRefused(EngineError):
    """The weights offered are not this engine's: a name, shape, dtype or digest differs. The old ones are in place."""


class StaleWeights(EngineError):
    """The version offered is not newer than the one held."""


class PromptTooLong(EngineError):
    """Prompt and answer do not fit in the model's positions."""


@dataclass(frozen=True)
class GenerateItem:
    """One sequence to sample. The answer is a function of these fields, the sampling settings and the logits."""

    prompt: np.ndarray
    """[P] int32, at least one token."""
    seed: int
    sample: int = 0
    """Tells the samples of one prompt apart."""


@dataclass(frozen=True)
class Completion:
    """One sampled answer."""

    tokens: np.ndarray
    """[T] int32, the stop token included."""
    logprobs: np.ndarray
    """[T] float32, nats, at the sampling temperature, before top-p and top-k."""
    finished: bool
    """True: ended by a stop token. False: cut at `max_new_tokens`."""


@dataclass(frozen=True)
class HeldWeights:
    """What an engine acts with, named by what it really holds."""

    version: int
    digest: str


class RolloutEngine(Protocol):
    """Samples answers with one version of the weights at a time."""

    held: HeldWeights
    """Version -1 and an empty digest before the first `load_weights`."""

    def generate(self, items: Sequence[GenerateItem], sampling: SamplingSettings) -> list[Completion]:
        """One completion an item, in order. The items are one fixed batch: they are computed together.

        Raises PromptTooLong naming the setting to change.
        """
        ...

    def load_weights(self, tensors: Mapping[str, np.ndarray], version: int, digest: str) -> str:
        """Swap in all of `tensors` or none, and return the digest of what the engine then holds.

        The digest is computed from the engine's own tensors. bfloat16 travels as uint16. Raises WeightsRefused or
        StaleWeights, after which the engine acts as before.
        """
        ...

    def statistics(self) -> dict[str, float]:
        """Counts since the start: sequences, tokens, seconds generating, swaps."""
        ...
