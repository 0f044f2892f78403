"""Reading prompts and decoding one token at a time, with a growing cache or with a fixed one under a CUDA graph.

Legend: U distinct prompts, B sequences, P padded prompt length, L cache length, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch


class Decoder(Protocol):
    """Holds the cache of one batch."""

    prompt_tokens: int

    def read(self, tokens: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Read tokens [U, P] under mask [U, P]; rows [B] says whose prompt each sequence has. Logits [B, V]."""
        ...

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens [B] and return the logits [B, V] of the next ones; valid until the next step."""
        ...


def left_padded(prompts: Sequence[np.ndarray], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as tokens [U, P] int64 and mask [U, P] int64, each ending in the last column."""
    length = max(len(prompt) for prompt in prompts)
    tokens = np.full((len(prompts), length), pad_id, dtype=np.int64)
    mask = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = 1
    return torch.from_numpy(tokens), torch.from_numpy(mask)


def make_decoder(model: torch.nn.Module, *, batch: int, new: int, graphs: bool) -> Decoder:
    """A fixed cache under a CUDA graph where asked for and the model attends everywhere, else a growing cache."""
    if graphs and not _slides(model.config):
        return GraphDecoder(model, batch, new)
    return GrowingDecoder(model)


class GrowingDecoder:
    """A cache that grows by a column a step: any model, any device."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.prompt_tokens = model, 0
        self._cache_name = cache_argument(model)

    def read(self, tokens: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.prompt_tokens = tokens.numel()
        logits, self.cache = read_prompts(self.model, self._cache_name, tokens, mask)
        self.cache.batch_select_indices(rows)
        self.mask = mask[rows]
        self.position = self.mask.sum(dim=1, keepdim=True)
        return logits[rows]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.position,
            use_cache=True,
            **{self._cache_name: self.cache},
        )
        self.position = self.position + 1
        return output.logits[:, -1]


class GraphDecoder:
    """A cache of fixed length L = P + new; one step is one replay of a CUDA graph. Needs a CUDA device."""

    def __init__(self, model: torch.nn.Module, batch: int, new: int) -> None:
        self.model, self.prompt_tokens = model, 0
        self._batch, self._new = batch, new
        self._cache_name = cache_argument(model)
        self._graph: torch.cuda.CUDAGraph | None = None

    def read(self, tokens: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        from transformers.cache_utils import StaticCache

        self.prompt_tokens = tokens.numel()
        logits, grown = read_prompts(self.model, self._cache_name, tokens, mask)
        length = tokens.shape[1]
        self.cache = StaticCache(config=self.model.config, max_cache_len=length + self._new)
        for fixed, layer in zip(self.cache.layers, grown.layers, strict=True):
            fixed.update(layer.keys[rows], layer.values[rows])
        self.mask = torch.zeros(self._batch, 1, 1, length + self._new, dtype=torch.bool, device=tokens.device)
        self.mask[:, 0, 0, :length] = mask[rows].bool()
        self.column = torch.tensor([length], device=tokens.device)
        self.position = mask[rows].sum(dim=1, keepdim=True)
        self.tokens = torch.zeros(self._batch, 1, dtype=torch.int64, device=tokens.device)
        return logits[rows]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens[:, None])
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()
        return self._logits

    def _capture(self) -> None:
        """Record a step. The rehearsal before it touches only columns that the replays write again."""
        state = [self.mask, self.column, self.position] + [layer.cumulative_length for layer in self.cache.layers]
        before = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._advance()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        # Other threads go on meanwhile: one may map and copy the next version, which the default mode forbids them all.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = self._advance()

    def _advance(self) -> torch.Tensor:
        self.mask.index_fill_(3, self.column, True)
        output = self.model(
            input_ids=self.tokens,
            attention_mask=self.mask,
            position_ids=self.position,
            use_cache=True,
            **{self._cache_name: self.cache},
        )
        self.column.add_(1)
        self.position.add_(1)
        return output.logits[:, -1]


def read_prompts(
    model: torch.nn.Module, cache_name: str, tokens: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """The logits [U, V] after each prompt, and the cache that holds the prompts."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    output = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **{cache_name: cache},
    )
    return output.logits[:, -1], cache


def cache_argument(model: torch.nn.Module) -> str:
    """What this version of transformers calls the cache: `cache`, or `past_key_values` before 5.2x."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _slides(config: Any) -> bool:
    return any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or [])
