"""What a rollout role asks of an engine. Nothing here knows torch or vLLM.

Legend: P tokens of a prompt, T tokens of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from cosmos_actor.roles.sampling import SamplingSettings

if TYPE_CHECKING:
    import torch

OnNewWeights = Literal["wait", "keep", "recompute", "abort"]
"""What becomes of sequences in flight when a version comes, by vLLM's names for it; see `rollout.on_new_weights`."""
WAIT: OnNewWeights = "wait"
KEEP: OnNewWeights = "keep"


class EngineError(Exception):
    """An engine could not do what it was asked; what it held before, it still holds, but for WeightsLost."""


class WeightsRefused(EngineError):
    """The weights offered are not this engine's: a name, shape, dtype or digest differs. The old ones are in place."""


class WeightsSpoiled(WeightsRefused):
    """The bytes offered are not those that the digest beside them was computed from. Others may be had."""


class WeightsLost(EngineError):
    """A swap failed on its way. The engine holds nothing, and answers nothing until it has taken a version whole."""


class StaleWeights(EngineError):
    """The version offered is not newer than the one held."""


class PromptTooLong(EngineError):
    """Prompt and answer do not fit in the model's positions."""


class NoWeights(EngineError):
    """An engine that begins without weights was asked before it was given any."""


class Asleep(EngineError):
    """An engine was asked for what it has no memory on its device for: it is not its turn there."""


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
    versions: np.ndarray
    """[T] int64, the version (HeldWeights.version) that each token was sampled with; never falling."""


@dataclass(frozen=True)
class HeldWeights:
    """What an engine acts with, named by what it really holds."""

    version: int
    digest: str


class Batch:
    """What was asked for at once, on its way: a completion for each item, in order, when its sequence has ended."""

    def __init__(self, items: Sequence[GenerateItem], sampling: SamplingSettings) -> None:
        self.items, self.sampling = list(items), sampling
        self.completions: list[Completion | None] = [None] * len(self.items)
        self._left = len(self.items)

    @property
    def done(self) -> bool:
        return self._left == 0

    def end(self, index: int, completion: Completion) -> None:
        """The sequence of item `index` has ended."""
        self.completions[index] = completion
        self._left -= 1

    def answers(self) -> list[Completion]:
        """All completions of a batch that is done."""
        return [completion for completion in self.completions if completion is not None]


class RolloutEngine(Protocol):
    """Samples a step at a time, so that batches can join and new weights can come between two steps."""

    held: HeldWeights
    """Version -1 and an empty digest before the first `load_weights`."""

    @property
    def in_flight(self) -> bool:
        """Whether any batch that was begun is not done."""
        ...

    def begin(self, items: Sequence[GenerateItem], sampling: SamplingSettings) -> Batch:
        """Take a batch in hand, for `step`. Raises PromptTooLong, naming the setting to change, or NoWeights."""
        ...

    def step(self) -> None:
        """Sample on in what is in flight, at least a token of it. What it raises, nothing in flight survives."""
        ...

    def drop(self, batch: Batch) -> None:
        """Nobody waits for `batch` any more."""
        ...

    def load_weights(self, tensors: Mapping[str, np.ndarray | torch.Tensor], version: int, digest: str) -> str:
        """Swap in all of `tensors` or none, and return the digest of what the engine then holds.

        They are arrays, in which bfloat16 travels as uint16, or torch's, on whatever device; once this has returned,
        the memory of these is another version's. The digest is of what the engine's own tensors are then. Sequences
        in flight go on as the engine was told to (OnNewWeights); with "wait" there must be none. Raises WeightsRefused
        or StaleWeights, after which the engine acts as before.
        """
        ...

    def read_back(self) -> str:
        """The digest of what the engine computes with now, from its own tensors, as `load_weights` finds it."""
        ...

    def statistics(self) -> dict[str, float]:
        """Counts since the start: sequences, tokens, seconds generating, swaps."""
        ...


WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""What of an engine is woken, in this order: new weights go in before there is a cache beside them."""
WAKES = (WEIGHTS, KV_CACHE)


class Sleeper(Protocol):
    """What an engine can do on top, whose device is another's for a time. Asleep it holds no memory there."""

    def sleep(self, level: int) -> None:
        """Level 1: weights wait on the host and come back as they were. Level 2: they are dropped, and are void until
        the next `load_weights`; what no version brings waits on the host. Its caches are dropped.

        Nothing may be in flight. Asleep already: nothing happens. Until it is awake `begin`, `step`, `load_weights` and
        `read_back` raise Asleep.
        """
        ...

    def wake(self, what: Sequence[str]) -> None:
        """Have memory for the parts named (WEIGHTS, KV_CACHE) on the device again. What is awake stays so."""
        ...


class AwakeParts:
    """Which parts of an engine are on its device, for engines that are Sleepers; all of them at first."""

    def __init__(self) -> None:
        self._parts = set(WAKES)

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, what: Iterable[str]) -> None:
        self._parts.update(what)

    def clear(self) -> None:
        self._parts.clear()

    def need(self, *parts: str) -> None:
        """Raises Asleep, naming those that are not there."""
        missing = [part for part in parts if part not in self._parts]
        if missing:
            raise Asleep(f"the engine has no {' and no '.join(missing)} on its device: it sleeps while the policy has "
                         "the GPU (run.colocated_offload)")


def check_may_sleep(engine: RolloutEngine) -> None:
    """Raises EngineError while anything is in flight."""
    if engine.in_flight:
        raise EngineError("sequences are in flight, and an engine that goes to sleep has nowhere to keep them")


def generate(engine: RolloutEngine, items: Sequence[GenerateItem], sampling: SamplingSettings) -> list[Completion]:
    """One completion an item, in order: `begin`, and `step` until it is done."""
    batch = engine.begin(items, sampling)
    while not batch.done:
        engine.step()
    return batch.answers()


def probe(engine: RolloutEngine) -> None:
    """Let `engine` do what it is for: a token of what is in flight, or of a prompt of one token.

    Raises EngineError when that token's log-prob is not finite.
    """
    if engine.in_flight:
        return engine.step()
    greedy = SamplingSettings(max_new_tokens=1, temperature=0.0)  # which every engine can, however it was started
    [answer] = generate(engine, [GenerateItem(np.zeros(1, np.int32), seed=0)], greedy)
    if not math.isfinite(answer.logprobs[0]):
        raise EngineError(f"weights {engine.held.version} give a token the log-prob {answer.logprobs[0]}")


def check_nothing_in_flight(engine: Any) -> None:
    """Raises EngineError where an engine that is to wait for what is in flight is given weights before it has."""
    if engine.on_new_weights == WAIT and engine.in_flight:
        raise EngineError("sequences are in flight, and rollout.on_new_weights = \"wait\"")


def check_lengths(items: Sequence[GenerateItem], sampling: SamplingSettings, positions: int,
                  whose: str = "the model's") -> None:
    """Raises PromptTooLong, naming the setting to change, unless each prompt and its answer fit into `positions`."""
    longest = max(len(item.prompt) for item in items)
    if min(len(item.prompt) for item in items) == 0:
        raise PromptTooLong("a prompt has no tokens")
    if longest + sampling.max_new_tokens > positions:
        raise PromptTooLong(
            f"a prompt of {longest} tokens and {sampling.max_new_tokens} new ones pass {whose} {positions}"
            " positions: lower `rollout.max_new_tokens`"
        )
