"""The ranks that share one model, and what they do together. With one rank nothing of torch.distributed is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cosmos_actor.trainer.models import blocks_of


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """``auto`` is a GPU where there is one. A plain ``cuda`` becomes this rank's own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)


@dataclass(frozen=True)
class World:
    """One rank's view of its group. Every method but the properties is a collective when size > 1."""

    rank: int
    size: int
    device: torch.device
    commands: Any = None
    """The process group over which a leader sends commands; None for a single rank."""

    @classmethod
    def alone(cls, device: str = "auto") -> World:
        """One rank."""
        return cls(rank=0, size=1, device=choose_device(device))

    def shard(self, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        """The model with its weights spread over the ranks, block by block; the model itself for one rank."""
        if self.size == 1:
            return model
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in blocks_of(model):
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    def autocast(self, dtype: torch.dtype) -> torch.dtype | None:
        """What a forward pass is to be cast to: sharded models cast their own weights."""
        return dtype if self.size == 1 and dtype != torch.float32 else None

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a sharded tensor; any other tensor as it is."""
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        return self._reduce(tensor, "SUM")

    def max_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over ranks."""
        return self._reduce(tensor, "MAX")

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """The sum over ranks of a host array."""
        if self.size == 1:
            return array
        return self.sum_tensor(torch.from_numpy(array).to(self.device)).cpu().numpy()

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier(group=self.commands)

    def _reduce(self, tensor: torch.Tensor, how: str) -> torch.Tensor:
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, how))
        return tensor
