"""Sequences in flight when new weights come, checked token by token against transformers. For any RolloutEngine.

Legend: P tokens of a prompt, T tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from cosmos_actor.roles.engine import Batch, Completion, GenerateItem
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.torch_decode import cache_argument
from cosmos_actor.trainer.correction import newest_mismatch
from cosmos_actor.trainer.model_weights import host_copies, named_tensors
from cosmos_actor.weight_plane.digest import weights_digest

LONG = [1, *([7, 8, 11, 12, 3] * 14)]
"""More than two blocks of vLLM's cache."""
PROMPTS = ([1, 4, 5], LONG, [*LONG, 9], [1, 9])
NEW, COUNT = 16, 16


def items(first: int = 0) -> list[GenerateItem]:
    return [GenerateItem(np.array(PROMPTS[i % 4], np.int32), seed=first + i // 4, sample=i) for i in range(COUNT)]


def offer(engine: Any, model: Any, version: int) -> None:
    weights = host_copies(named_tensors(model).items())
    assert engine.load_weights(weights, version, weights_digest(weights)) == weights_digest(weights)


def three_versions(engine: Any, models: Mapping[int, Any], first: int, temperature: float) -> list[Batch]:
    """Two batches, the second begun under the second version; versions `first` and two more come as they are made."""
    settings = SamplingSettings(max_new_tokens=NEW, temperature=temperature)
    offer(engine, models[first], first)
    batches = [engine.begin(items(), settings)]
    for version in (first + 1, first + 2):
        for _ in range(4):
            engine.step()
        if engine.on_new_weights == "wait":
            while engine.in_flight:
                engine.step()
        offer(engine, models[version], version)
        if version == first + 1:
            batches.append(engine.begin(items(100), settings))
    while engine.in_flight:
        engine.step()
    return batches


def versions_of(batches: Sequence[Batch]) -> list[list[int]]:
    """For each batch the versions that sampled it. Checks that no answer goes back to an older one."""
    for batch in batches:
        for answer in batch.answers():
            assert len(answer.tokens) == len(answer.versions) == len(answer.logprobs) <= NEW
            assert sorted(answer.versions) == answer.versions.tolist()
    return [sorted({int(v) for answer in batch.answers() for v in answer.versions}) for batch in batches]


def mixed(batches: Sequence[Batch]) -> int:
    """Answers that more than one version sampled."""
    return sum(len(set(answer.versions.tolist())) > 1 for batch in batches for answer in batch.answers())


@torch.inference_mode()
def off(models: Mapping[int, Any], batches: Sequence[Batch], temperature: float, kept: bool = False) -> float:
    """The largest difference, in nats, of a token's log-prob from that of transformers, under that token's version.

    kept: what an earlier version has read is not read anew, so a later one goes on from the earlier one's cache.
    """
    right = _with_old_cache if kept else _read_anew
    worst = 0.0
    for batch in batches:
        for item, answer in zip(batch.items, batch.answers(), strict=True):
            table = torch.log_softmax(right(models, item.prompt, answer).double() / temperature, dim=-1)
            found = table.gather(1, torch.tensor(answer.tokens).long()[:, None])[:, 0]
            worst = max(worst, float((found - torch.tensor(answer.logprobs)).abs().max()))
    return worst


@torch.inference_mode()
def compared(model: Any, batches: Sequence[Batch], temperature: float) -> dict[str, float]:
    """The trainer's metrics of these batches when `model` is the trainer's. [answers, NEW] each."""
    answers = [(item, answer) for batch in batches for item, answer in zip(batch.items, batch.answers(), strict=True)]
    x, o, mask, versions = (np.zeros((len(answers), NEW)) for _ in range(4))
    for row, (item, answer) in enumerate(answers):
        length = len(answer.tokens)
        sequence = torch.tensor([[*item.prompt.tolist(), *answer.tokens.tolist()]])
        logits = model(input_ids=sequence).logits[0, len(item.prompt) - 1 : -1].double() / temperature
        table = torch.log_softmax(logits, dim=-1)
        x[row, :length] = table.gather(1, torch.tensor(answer.tokens).long()[:, None])[:, 0].numpy()
        o[row, :length], mask[row, :length], versions[row, :length] = answer.logprobs, 1, answer.versions
    return newest_mismatch(x, o, mask, versions)


def _read_anew(models: Mapping[int, Any], prompt: np.ndarray, answer: Completion) -> torch.Tensor:
    """[T, V] logits of each token, by the model of its version on the same prefix."""
    sequence = torch.tensor([[*prompt.tolist(), *answer.tokens.tolist()]])
    logits = {int(v): models[int(v)](input_ids=sequence).logits[0, len(prompt) - 1 : -1] for v in set(answer.versions)}
    return torch.stack([logits[int(version)][at] for at, version in enumerate(answer.versions)])


def _with_old_cache(models: Mapping[int, Any], prompt: np.ndarray, answer: Completion) -> torch.Tensor:
    """[T, V] logits of each token, by the model of its version, whose cache has what earlier versions put there."""
    from transformers.cache_utils import DynamicCache

    config = next(iter(models.values())).config
    cache, rows, read = DynamicCache(config=config), [], 0
    sequence = torch.tensor([[*prompt.tolist(), *answer.tokens.tolist()]])
    for version, tokens in groupby(answer.versions.tolist()):
        model, count = models[version], len(list(tokens))
        upto = len(prompt) + sum(map(len, rows)) + count - 1
        output = model(input_ids=sequence[:, read:upto], use_cache=True, **{cache_argument(model): cache},
                       position_ids=torch.arange(read, upto)[None])
        rows.append(output.logits[0, -count:])
        read = upto
    return torch.cat(rows)
