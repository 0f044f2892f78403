"""Versions for vLLM on a CPU, which packs them for its kernels: its own reload, and a reading through the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from cosmos_actor.roles.vllm_weights import Place, Small, held_digest, pack_heads, small_numbers


class Loader(Protocol):
    """How versions get into vLLM, and what is then there."""

    def load(self, offered: Mapping[str, torch.Tensor], version: int, digest: str) -> str:
        """The digest of what vLLM computes with after it was given `offered`, whose digest is `digest`.

        Raises WeightsRefused when nothing was touched; after anything else vLLM's weights are of no version.
        """
        ...

    def read_back(self) -> str:
        """The digest of what vLLM computes with now."""
        ...


class Worker(Protocol):
    """vLLM's worker in this process: calls a function with it, and gives what that returns."""

    def __call__(self, ask: Callable[[Any], Any]) -> Any: ...


class Packed:
    """The digest is of what the layers compute with, through their kernels; see `vllm_weights`."""

    def __init__(self, worker: Worker, found: Mapping[str, Place]) -> None:
        self._worker, self._found = worker, found
        self._small: dict[str, Small] = {}

    def load(self, offered: Mapping[str, torch.Tensor], version: int, digest: str) -> str:
        """See Loader.load."""
        self._worker(lambda worker: worker.reload_weights(weights_iterator=list(offered.items())))
        self._worker(lambda worker: pack_heads(worker.get_model()))
        self.remember(offered)
        return self.read_back()

    def remember(self, offered: Mapping[str, torch.Tensor]) -> None:
        """What vLLM was given, by whatever way: for what no product tells of it."""
        self._small = small_numbers(offered)

    def read_back(self) -> str:
        """See Loader.read_back."""
        return str(self._worker(lambda worker: held_digest(worker.get_model(), self._found, self._small)))
