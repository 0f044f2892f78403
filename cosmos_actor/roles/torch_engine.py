"""The built-in rollout engine: a transformers model, batched sampling with a KV cache.

Legend: U distinct prompts, B sequences, P padded prompt length, T new tokens, V vocabulary.
Each distinct prompt is read once and its cache is then copied to all its samples. Prompts are padded on the left, so
that the newest token of every sequence is in the last column.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cosmos_actor.roles.engine import (
    Completion,
    GenerateItem,
    HeldWeights,
    PromptTooLong,
)
from cosmos_actor.roles.newer_weights import load_newer
from cosmos_actor.roles.sampling import SamplingSettings, uniforms
from cosmos_actor.roles.tokenizer import load_tokenizer
from cosmos_actor.roles.torch_decode import Decoder, left_padded, make_decoder
from cosmos_actor.trainer.models import load_model, use_threads
from cosmos_actor.trainer.world import choose_device

STEPS_BETWEEN_CHECKS = {"cpu": 1, "cuda": 8}
# How often a batch asks whether all of it has ended. Each question makes the host wait for the GPU.


class TorchEngine:
    """Implements RolloutEngine. An answer depends on its prompt, seed, settings and the weights held, nothing else."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        stop_ids: Sequence[int],
        pad_id: int,
        cuda_graphs: bool = True,
        threads: int = 1,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.device = next(model.parameters()).device
        self.held = HeldWeights(version=-1, digest="")
        self._stop_ids, self._pad_id, self._threads = tuple(stop_ids), pad_id, threads
        self._cuda_graphs = cuda_graphs and self.device.type == "cuda"
        self._counts = {"sequences": 0.0, "tokens": 0.0, "prompt_tokens": 0.0, "seconds": 0.0, "swaps": 0.0}

    @classmethod
    def from_settings(cls, settings: Any) -> TorchEngine:
        """An engine for a run's settings. Its weights are those of the model's name until the first `load_weights`."""
        policy, rollout = settings.policy, settings.rollout
        tokenizer = load_tokenizer(policy.model)
        model = load_model(
            policy.model, seed=policy.seed, dtype=policy.publish_dtype, device=choose_device(rollout.device)
        )
        return cls(model, stop_ids=tokenizer.stop_ids, pad_id=tokenizer.pad_id, threads=rollout.threads)

    @torch.inference_mode()
    def generate(self, items: Sequence[GenerateItem], sampling: SamplingSettings) -> list[Completion]:
        """See RolloutEngine.generate."""
        if not items:
            return []
        started = time.perf_counter()
        use_threads(self._threads)
        self._check_lengths(items, sampling)
        decoder, logits = self._read_prompts(items, sampling)
        tokens, logprobs = self._sample(decoder, logits, items, sampling)
        completions = _cut(tokens, logprobs, self._stops(sampling))
        self._count(completions, decoder, time.perf_counter() - started)
        return completions

    def load_weights(self, tensors: Mapping[str, np.ndarray], version: int, digest: str) -> str:
        """See RolloutEngine.load_weights. All arrays are checked against `digest` before the first is copied."""
        self.held = load_newer(self.model, self.held, tensors, version, digest)
        self._counts["swaps"] += 1
        return self.held.digest

    def statistics(self) -> dict[str, float]:
        """See RolloutEngine.statistics."""
        return dict(self._counts)

    def _check_lengths(self, items: Sequence[GenerateItem], sampling: SamplingSettings) -> None:
        longest = max(len(item.prompt) for item in items)
        positions = getattr(self.model.config, "max_position_embeddings", None) or 1 << 30
        if min(len(item.prompt) for item in items) == 0:
            raise PromptTooLong("a prompt has no tokens")
        if longest + sampling.max_new_tokens > positions:
            raise PromptTooLong(
                f"a prompt of {longest} tokens and {sampling.max_new_tokens} new ones pass the model's {positions}"
                " positions: lower `rollout.max_new_tokens`"
            )

    def _read_prompts(self, items: Sequence[GenerateItem], sampling: SamplingSettings) -> tuple[Decoder, torch.Tensor]:
        """A decoder that has read all prompts, and the logits [B, V] of what comes next."""
        distinct: dict[bytes, int] = {}
        keys = [np.asarray(item.prompt, dtype=np.int64).tobytes() for item in items]
        rows = [distinct.setdefault(key, len(distinct)) for key in keys]
        prompts = [np.frombuffer(key, dtype=np.int64) for key in distinct]
        tokens, mask = left_padded(prompts, self._pad_id)
        decoder = make_decoder(self.model, batch=len(items), new=sampling.max_new_tokens, graphs=self._cuda_graphs)
        return decoder, decoder.read(tokens.to(self.device), mask.to(self.device), torch.tensor(rows).to(self.device))

    def _sample(
        self, decoder: Decoder, logits: torch.Tensor, items: Sequence[GenerateItem], sampling: SamplingSettings
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [B, T] int64 and log-probs [B, T] float32; what follows a stop token means nothing."""
        noise = torch.from_numpy(uniforms([(item.seed, item.sample) for item in items], sampling.max_new_tokens))
        noise = noise.to(self.device)
        stops = torch.tensor(self._stops(sampling), device=self.device)
        ended = torch.zeros(len(items), dtype=torch.bool, device=self.device)
        check = STEPS_BETWEEN_CHECKS.get(self.device.type, 1)
        tokens, logprobs = [], []
        for step in range(sampling.max_new_tokens):
            chosen, logprob = choose(logits.float(), noise[:, step], sampling)
            tokens.append(chosen)
            logprobs.append(logprob)
            ended |= torch.isin(chosen, stops)
            last = step + 1 == sampling.max_new_tokens
            if last or ((step + 1) % check == 0 and bool(ended.all())):
                break
            logits = decoder.step(chosen)
        return torch.stack(tokens, 1).cpu().numpy(), torch.stack(logprobs, 1).float().cpu().numpy()

    def _stops(self, sampling: SamplingSettings) -> tuple[int, ...]:
        return sampling.stop_ids or self._stop_ids

    def _count(self, completions: list[Completion], decoder: Decoder, seconds: float) -> None:
        self._counts["sequences"] += len(completions)
        self._counts["tokens"] += sum(len(completion.tokens) for completion in completions)
        self._counts["prompt_tokens"] += decoder.prompt_tokens
        self._counts["seconds"] += seconds


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


def _cut(tokens: np.ndarray, logprobs: np.ndarray, stops: tuple[int, ...]) -> list[Completion]:
    """Each row up to and with its first stop token."""
    stopped = np.isin(tokens, stops)
    finished = stopped.any(axis=1)
    lengths = np.where(finished, stopped.argmax(axis=1) + 1, tokens.shape[1])
    return [
        Completion(row[:length].astype(np.int32), values[:length].astype(np.float32), bool(done))
        for row, values, length, done in zip(tokens, logprobs, lengths.tolist(), finished.tolist(), strict=True)
    ]


