"""The built-in rollout engine: a transformers model, batched sampling with a KV cache.

Legend: U distinct prompts, B sequences, P padded prompt length, T new tokens, V vocabulary.
Each distinct prompt is read once and its cache is then copied to all its samples. Prompts are padded on the left, so
that the newest token of every sequence is in the last column.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cosmos_actor.roles.engine import (
    KEEP,
    WAIT,
    WAKES,
    WEIGHTS,
    AwakeParts,
    Batch,
    Completion,
    GenerateItem,
    HeldWeights,
    NoWeights,
    OnNewWeights,
    check_lengths,
    check_may_sleep,
    check_nothing_in_flight,
    generate,
)
from cosmos_actor.roles.newer_weights import load_newer
from cosmos_actor.roles.quantised import Made, round_layers, statistics_of
from cosmos_actor.roles.sampling import SamplingSettings, uniforms
from cosmos_actor.roles.tokenizer import load_tokenizer
from cosmos_actor.roles.torch_decode import Decoder, left_padded, make_decoder
from cosmos_actor.trainer.adapter import load_served_model
from cosmos_actor.trainer.model_weights import named_tensors, weights_digest_of
from cosmos_actor.trainer.models import use_threads
from cosmos_actor.trainer.parking import ParkingPlace
from cosmos_actor.trainer.world import choose_device

STEPS_BETWEEN_CHECKS = {"cpu": 1, "cuda": 8}
# How often a batch asks whether all of it has ended. Each question makes the host wait for the GPU.


class TorchEngine:
    """Implements RolloutEngine. An answer depends on its prompt, seed, settings and the weights held, nothing else.

    Batches are computed one after the other. Where new weights need not wait for one, a step is a token, or so many as
    are sampled between two looks at who has ended; otherwise it is the whole batch.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        stop_ids: Sequence[int],
        pad_id: int,
        cuda_graphs: bool = True,
        threads: int = 1,
        on_new_weights: OnNewWeights = WAIT,
        fp8: bool = False,
    ) -> None:
        """fp8: compute with matrices that were rounded to e4m3; see `quantised`. It saves nothing here, and is for
        seeing what that does to log-probs."""
        self.model = model.eval().requires_grad_(False)
        self.device = next(model.parameters()).device
        self.held = HeldWeights(version=-1, digest="")
        self._stop_ids, self._pad_id, self._threads = tuple(stop_ids), pad_id, threads
        self._cuda_graphs = cuda_graphs and self.device.type == "cuda"
        if self.device.type == "cuda":  # Seen with torch 2.11 on an H200: in a graph it gave other bits every time.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.on_new_weights = on_new_weights
        self._batches: deque[Batch] = deque()
        self._decoding: _Decoding | None = None
        """The first of them, once it was begun."""
        self._made = Made("", "") if fp8 else None
        self._distances: dict[str, float] = {}
        self._parking, self._awake, self._void = ParkingPlace(self.device), AwakeParts(), False
        self._counts = {"sequences": 0.0, "tokens": 0.0, "prompt_tokens": 0.0, "seconds": 0.0, "swaps": 0.0}

    @classmethod
    def from_settings(cls, settings: Any) -> TorchEngine:
        """An engine for a run's settings. Its weights are those of the model's name until the first `load_weights`."""
        policy, rollout = settings.policy, settings.rollout
        tokenizer = load_tokenizer(policy.model)
        model = load_served_model(policy, choose_device(rollout.device))
        return cls(model, stop_ids=tokenizer.stop_ids, pad_id=tokenizer.pad_id, threads=rollout.threads,
                   on_new_weights=rollout.on_new_weights, cuda_graphs=rollout.cuda_graphs,
                   fp8=rollout.quantization == "fp8")

    @property
    def in_flight(self) -> bool:
        """See RolloutEngine.in_flight."""
        return bool(self._batches)

    def begin(self, items: Sequence[GenerateItem], sampling: SamplingSettings) -> Batch:
        """See RolloutEngine.begin."""
        self._awake.need(*WAKES)
        self._need_weights()
        batch = Batch(items, sampling)
        if not batch.done:
            positions = getattr(self.model.config, "max_position_embeddings", None) or 1 << 30
            check_lengths(items, sampling, positions)
            self._batches.append(batch)
        return batch

    @torch.inference_mode()
    def step(self) -> None:
        """See RolloutEngine.step."""
        self._awake.need(*WAKES)
        if not self._batches:
            return
        started = time.perf_counter()
        use_threads(self._threads)
        try:
            self._bring_on(self._batches[0])
        except Exception:
            self._batches.clear()
            self._decoding = None
            raise
        self._counts["seconds"] += time.perf_counter() - started

    def drop(self, batch: Batch) -> None:
        """See RolloutEngine.drop."""
        if self._batches and batch is self._batches[0]:
            self._decoding = None
        if batch in self._batches:
            self._batches.remove(batch)

    def generate(self, items: Sequence[GenerateItem], sampling: SamplingSettings) -> list[Completion]:
        """See engine.generate."""
        return generate(self, items, sampling)

    def load_weights(self, tensors: Mapping[str, Any], version: int, digest: str) -> str:
        """See RolloutEngine.load_weights. All arrays are checked against `digest` before the first is copied.

        With fp8 the digest is of what was sent, found in the model before it was rounded there.
        """
        self._awake.need(WEIGHTS)
        check_nothing_in_flight(self)
        self.held = load_newer(self.model, self.held, tensors, version, digest)
        if self._made is not None:
            self._distances = statistics_of(round_layers(self.model))
            self._made = Made(self.held.digest, weights_digest_of(self.model))
        self._void = False
        if self._decoding is not None and self.on_new_weights != KEEP:
            self._decoding.read_again()
        self._counts["swaps"] += 1
        return self.held.digest

    def read_back(self) -> str:
        """See RolloutEngine.read_back."""
        self._awake.need(WEIGHTS)
        self._need_weights()
        now = weights_digest_of(self.model)
        return now if self._made is None else self._made.name(now)

    def sleep(self, level: int) -> None:
        """See Sleeper.sleep."""
        check_may_sleep(self)
        if WEIGHTS in self._awake:
            brought = [one for one in named_tensors(self.model).values() if isinstance(one, torch.nn.Parameter)]
            known = {id(one) for one in brought}
            base = [one for one in self.model.parameters() if id(one) not in known]  # of an adapter
            self._parking.park([*brought, *self.model.buffers()], constant=base, void=brought if level == 2 else ())
            if level == 2:
                self.held, self._void = HeldWeights(version=-1, digest=""), True
        self._awake.clear()

    def wake(self, what: Sequence[str]) -> None:
        """See Sleeper.wake."""
        if WEIGHTS in what:
            self._parking.unpark()
        self._awake.add(what)

    def statistics(self) -> dict[str, float]:
        """See RolloutEngine.statistics. fp8/KIND/rms, /max: how far the newest version was rounded."""
        return {**self._counts, **self._distances}

    def _need_weights(self) -> None:
        if self._void:
            raise NoWeights("the engine's weights were dropped when it went to sleep (rollout.sleep_level = 2), and no "
                            "version has come since")

    def _bring_on(self, batch: Batch) -> None:
        if self._decoding is None:
            self._decoding = _Decoding(self, batch, batch.sampling.stop_ids or self._stop_ids)
        decoding = self._decoding
        check = STEPS_BETWEEN_CHECKS.get(self.device.type, 1)
        while not decoding.step(check):
            if self.on_new_weights != WAIT:
                return
        for index, completion in enumerate(decoding.completions()):
            batch.end(index, completion)
        self._batches.popleft()
        self._decoding = None
        self._counts["sequences"] += len(batch.items)
        self._counts["tokens"] += sum(len(completion.tokens) for completion in batch.answers())
        self._counts["prompt_tokens"] += decoding.prompt_tokens

    def decoder(self, prompts: Sequence[np.ndarray], rows: Sequence[int], new: int) -> tuple[Decoder, torch.Tensor]:
        """A decoder of B sequences that has read the prompts, `rows` says whose each has; the logits [B, V] of what
        comes next."""
        tokens, mask = left_padded(prompts, self._pad_id)
        decoder = make_decoder(self.model, batch=len(rows), new=new, graphs=self._cuda_graphs)
        return decoder, decoder.read(tokens.to(self.device), mask.to(self.device), torch.tensor(rows).to(self.device))


class _Decoding:
    """The batch in hand: its decoder, and what it has sampled."""

    def __init__(self, engine: TorchEngine, batch: Batch, stops: tuple[int, ...]) -> None:
        self._engine, self._items, self._sampling, self._stops = engine, batch.items, batch.sampling, stops
        noise = uniforms([(item.seed, item.sample) for item in batch.items], batch.sampling.max_new_tokens)
        self._noise = torch.from_numpy(noise).to(engine.device)
        self._stop = torch.tensor(stops, device=engine.device)
        self._ended = torch.zeros(len(batch.items), dtype=torch.bool, device=engine.device)
        self._tokens: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []
        self._versions: list[int] = []
        distinct: dict[bytes, int] = {}
        keys = [np.asarray(item.prompt, dtype=np.int64).tobytes() for item in batch.items]
        rows = [distinct.setdefault(key, len(distinct)) for key in keys]
        prompts = [np.frombuffer(key, dtype=np.int64) for key in distinct]
        self._decoder, logits = engine.decoder(prompts, rows, batch.sampling.max_new_tokens)
        self.prompt_tokens = self._decoder.prompt_tokens
        self._logits: torch.Tensor | None = logits

    def step(self, most: int) -> bool:
        """Sample up to `most` tokens a sequence; whether that was the end of all of them."""
        for _ in range(most):
            at = len(self._tokens)
            logits = self._decoder.step(self._tokens[-1]) if self._logits is None else self._logits
            chosen, logprob = choose(logits.float(), self._noise[:, at], self._sampling)
            self._logits = None
            self._tokens.append(chosen)
            self._logprobs.append(logprob)
            self._versions.append(self._engine.held.version)
            self._ended |= torch.isin(chosen, self._stop)
            if at + 1 == self._sampling.max_new_tokens:
                return True
        return bool(self._ended.all())

    @torch.inference_mode()
    def read_again(self) -> None:
        """The weights are others: read prompts and what was sampled with them. What follows a stop token is read too,
        and means nothing."""
        sampled = torch.stack(self._tokens, 1).cpu().numpy()
        prompts = [np.concatenate([item.prompt, row]) for item, row in zip(self._items, sampled, strict=True)]
        left = self._sampling.max_new_tokens - len(self._tokens)
        self._decoder, self._logits = self._engine.decoder(prompts, range(len(prompts)), left)
        self.prompt_tokens += self._decoder.prompt_tokens

    def completions(self) -> list[Completion]:
        """Each sequence up to and with its first stop token."""
        tokens = torch.stack(self._tokens, 1).cpu().numpy()
        logprobs = torch.stack(self._logprobs, 1).float().cpu().numpy()
        return _cut(tokens, logprobs, np.array(self._versions, dtype=np.int64), self._stops)


def choose(
    logits: torch.Tensor, uniform: torch.Tensor, sampling: SamplingSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-prob at the sampling temperature.

    logits [B, V] float32, uniform [B] float64 in [0, 1) -> tokens [B] int64, log-probs [B] float32. The token is the
    first whose cumulative probability, in float64, passes `uniform`, so a token of probability zero is never chosen.
    """
    logprobs = torch.log_softmax(logits / sampling.logprob_temperature, dim=-1)
    if sampling.temperature == 0:
        chosen = logits.argmax(dim=-1)
    else:
        cumulative = _truncated(logprobs.double().exp(), sampling).cumsum(dim=-1)
        total = cumulative[:, -1]
        target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]


def _truncated(probabilities: torch.Tensor, sampling: SamplingSettings) -> torch.Tensor:
    """`probabilities` [B, V] with zeros where top-k and top-p forbid a token; the likeliest is always allowed."""
    if not sampling.truncates:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    allowed = before < sampling.top_p
    if sampling.top_k:
        allowed[:, sampling.top_k :] = False
    return torch.zeros_like(probabilities).scatter(1, order, torch.where(allowed, ordered, 0.0))


def _cut(tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, stops: tuple[int, ...]) -> list[Completion]:
    """Each row up to and with its first stop token."""
    stopped = np.isin(tokens, stops)
    finished = stopped.any(axis=1)
    lengths = np.where(finished, stopped.argmax(axis=1) + 1, tokens.shape[1])
    return [
        Completion(row[:length].astype(np.int32), values[:length].astype(np.float32), bool(done), versions[:length])
        for row, values, length, done in zip(tokens, logprobs, lengths.tolist(), finished.tolist(), strict=True)
    ]


