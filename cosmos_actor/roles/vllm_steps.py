"""Sequences on their way through vLLM's engine, one step at a time, and what becomes of them when new weights come.

    begin ──joins──> in flight ──a token a step──> a stop token, or as many as were asked for
                        │  ^
             new weights└──┘ keep, recompute or abort; see OnNewWeights

Each token is stamped with the version that sampled it. What vLLM caches of a prompt is salted by version and digest: a
sequence finds what others of its version have read, and nothing of another version. One thread calls all of this.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cosmos_actor.roles.engine import Batch, Completion, EngineError, GenerateItem, HeldWeights, OnNewWeights
from cosmos_actor.roles.sampling import SamplingSettings

Parameters = Callable[[SamplingSettings, int, int], Any]
"""(how to sample, the most new tokens, a seed) -> vLLM's SamplingParams."""


@dataclass
class Flight:
    """One sequence in vLLM."""

    batch: Batch
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def item(self) -> GenerateItem:
        return self.batch.items[self.index]

    def completion(self, finished: bool) -> Completion:
        return Completion(np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32), finished,
                          np.array(self.versions, np.int64))


class Flights:
    """Feeds vLLM's `LLM`, whose engine core is in this process, and takes what it samples.

    joining: batches join what is in flight, and find what earlier ones read. Otherwise each is computed alone, from
    nothing, and the same one gives the same bits again.
    """

    def __init__(self, llm: Any, parameters: Parameters, joining: bool, adapter: Any = None) -> None:
        """adapter: vLLM's LoRARequest for all of them; None: they are sampled by a whole model."""
        self._llm, self._parameters, self._joining, self._adapter = llm, parameters, joining, adapter
        self._waiting: deque[Batch] = deque()
        self._flying: dict[str, Flight] = {}
        self._count = 0
        self._held: HeldWeights | None = None
        self.cached_tokens = 0
        """Of prompts that did not have to be read, since another sequence of the version had."""

    def __bool__(self) -> bool:
        """Whether any sequence is on its way."""
        return bool(self._waiting or self._flying)

    def begin(self, batch: Batch) -> None:
        self._waiting.append(batch)

    def step(self) -> list[Batch]:
        """One step of vLLM; the batches that are done by it. When it fails, nothing of what was in flight is left."""
        try:
            self._join()
            return [batch for output in self._llm.llm_engine.step() if (batch := self._take(output)) is not None]
        except Exception:
            self.give_up()
            raise

    def drop(self, batch: Batch) -> None:
        if batch in self._waiting:
            self._waiting.remove(batch)
        self._leave([name for name, flight in self._flying.items() if flight.batch is batch])

    def give_up(self) -> None:
        """Nothing is on its way any more."""
        self._waiting.clear()
        self._leave(list(self._flying))

    def switch(self, held: HeldWeights, mode: OnNewWeights) -> None:
        """vLLM has other weights now, `held`: what is in flight goes on with them as `mode` says."""
        self._held = held
        if mode == "keep":
            self._again([name for name, flight in self._flying.items() if not flight.tokens])  # nothing of it to keep
        elif mode == "abort":
            self._again(list(self._flying))
            self._forget()
        elif not self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not let go of what it had computed with the weights before")

    def _join(self) -> None:
        while self._waiting and (self._joining or not self._flying):
            if not self._joining:
                self._forget()
            batch = self._waiting.popleft()
            for index in range(len(batch.items)):
                self._add(Flight(batch, index))

    def _add(self, flight: Flight) -> None:
        """What it has sampled already is read as a part of its prompt."""
        assert self._held is not None
        self._count += 1
        name, drawn = str(self._count), len(flight.tokens)
        prompt = [*np.asarray(flight.item.prompt).tolist(), *flight.tokens]
        parameters = self._parameters(flight.batch.sampling, flight.batch.sampling.max_new_tokens - drawn,
                                      seed_of(flight.item, drawn))
        self._flying[name] = flight
        salt = f"{self._held.version}/{self._held.digest}"
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": salt}, parameters,
                                         lora_request=self._adapter)

    def _again(self, names: list[str]) -> None:
        """These begin anew where they are, as requests of the version held, in their order."""
        flights = [self._flying[name] for name in names]
        self._leave(names)
        for flight in flights:
            self._add(flight)

    def _leave(self, names: list[str]) -> None:
        for name in names:
            del self._flying[name]
        self._llm.llm_engine.abort_request(names)

    def _take(self, output: Any) -> Batch | None:
        """The batch that this output of vLLM ends, if it does."""
        flight, [answer] = self._flying[output.request_id], output.outputs
        assert self._held is not None
        if not flight.tokens:
            self.cached_tokens += output.num_cached_tokens or 0
        logprobs = [table[token].logprob for token, table in zip(answer.token_ids, answer.logprobs, strict=True)]
        if not all(map(math.isfinite, logprobs)):
            raise EngineError(f"weights {self._held.version} give a token a log-prob that is not finite: {logprobs}")
        flight.tokens += answer.token_ids
        flight.logprobs += logprobs
        flight.versions += [self._held.version] * len(logprobs)
        if answer.finish_reason is None:
            return None
        del self._flying[output.request_id]
        flight.batch.end(flight.index, flight.completion(answer.finish_reason == "stop"))
        return flight.batch if flight.batch.done else None

    def _forget(self) -> None:
        """So that nothing rests on what was computed before, least of all with other weights."""
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not let go of the prompts that it had read")


def seed_of(item: GenerateItem, drawn: int = 0) -> int:
    """One seed of 63 bits for (seed, sample), another after each number of tokens that were drawn by an earlier one."""
    text = f"{item.seed}/{item.sample}" + (f"/{drawn}" if drawn else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
