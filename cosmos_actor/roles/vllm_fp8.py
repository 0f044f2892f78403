"""Versions for a vLLM that rounds the matrices of its linear layers to fp8 when it takes them.

What was sent has been compared with its digest before; vLLM's reload then quantises it. What is held is other bytes, so
it is named by what it was made of (`quantised.Made`), and how far it is from that is measured at each version.

Legend: O outputs and I inputs of a layer. vLLM keeps [I, O] in e4m3, padded to 16, and a scale for each output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cosmos_actor.roles.engine import EngineError
from cosmos_actor.roles.quantised import E4M3, Made, distances, statistics_of
from cosmos_actor.roles.vllm_packed import Worker
from cosmos_actor.roles.vllm_weights import Place
from cosmos_actor.weight_plane.device_digest import weights_digest_on


class Fp8:
    """See vllm_packed.Loader."""

    def __init__(self, worker: Worker, found: Mapping[str, Place]) -> None:
        self._worker, self._found = worker, found
        self._made = Made("", "")
        self.distances: dict[str, float] = {}
        """Of the newest version, as in an engine's statistics."""

    def load(self, offered: Mapping[str, torch.Tensor], version: int, digest: str) -> str:
        """`digest`, which is of `offered`, when vLLM holds what it makes of them.

        Raises EngineError when no layer was rounded, or what was not is not as it was sent.
        """
        self._worker(lambda worker: worker.reload_weights(weights_iterator=list(offered.items())))
        self.distances = self._worker(lambda worker: self._measured(worker.get_model(), offered))
        if not self.distances:
            raise EngineError("vLLM rounded no layer to fp8")
        self._made = Made(digest, self._held())
        return digest

    def read_back(self) -> str:
        """See Made.name."""
        return self._made.name(self._held())

    def _held(self) -> str:
        return str(self._worker(lambda worker: held_bytes_digest(worker.get_model())))

    @torch.inference_mode()
    def _measured(self, model: Any, offered: Mapping[str, torch.Tensor]) -> dict[str, float]:
        return statistics_of(distances(self._pairs(model, offered)))

    def _pairs(self, model: Any,
               offered: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, place in self._found.items():
            module = model.get_submodule(place.module)
            kept = module.get_parameter(place.parameter).data
            if kept.dtype == E4M3:
                yield name, offered[name], whole_rows(kept, module.weight_scale.data, place, offered[name].shape[1])
            elif not torch.equal(kept[place.start : place.start + place.rows], offered[name].to(kept.device)):
                raise EngineError(f"vLLM computes with another {name} than it was given")


def whole_rows(kept: torch.Tensor, scale: torch.Tensor, place: Place, inputs: int) -> torch.Tensor:
    """[rows, I] float32: a tensor's rows of a layer's matrix [I, O] in e4m3, multiplied by their scales."""
    rows = slice(place.start, place.start + place.rows)
    return kept.t()[rows, :inputs].float() * scale.reshape(-1, 1)[rows]


@torch.inference_mode()
def held_bytes_digest(model: Any) -> str:
    """The digest of all parameters as they lie there, scales included."""
    return weights_digest_on({name: _plain(parameter.data) for name, parameter in model.named_parameters()})


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().view(torch.uint8) if tensor.dtype == E4M3 else tensor
