"""Versions for vLLM on a GPU: each tensor is written into its rows of vLLM's own parameters, and read back from there.

Unquantised layers compute with these very tensors there (`torch.nn.functional.linear`), so nothing has to be packed
anew, and CUDA graphs, which know their addresses, compute with what is written.

    tensors ──pinned memory, where they are on the host──> rows of parameters ──sums, 16 bytes a block──> digest
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from cosmos_actor.roles.to_device import copy_to_device
from cosmos_actor.roles.vllm_weights import NotFoundInVllm, Place, TwoMatrices, tied_heads
from cosmos_actor.weight_plane.device_digest import tensor_digests_on
from cosmos_actor.weight_plane.digest import combined_digest
from cosmos_actor.weight_plane.reshard import size


class InPlace:
    """A version is in vLLM's parameters whole, or whoever writes it hears why not.

    Padding, which is what no tensor has rows for, is zero after each writing: vLLM starts with anything in it.
    """

    def __init__(self, model: Any, found: Mapping[str, Place], dtypes: Mapping[str, torch.dtype]) -> None:
        """found: the place of each tensor; dtypes: as they will come. Raises NotFoundInVllm for a parameter that has
        another: it would be rounded on its way."""
        self._model = model
        self._found = {name: place for name, place in found.items() if size(place.box)}
        self._modules = {place.module: model.get_submodule(place.module) for place in self._found.values()}
        self._ends = _ends(self._found.values())
        for name, rows in self._rows().items():
            if rows.dtype != dtypes[name]:
                raise NotFoundInVllm(f"vLLM's {found[name].module} has {rows.dtype} for {name} of {dtypes[name]}")
        self._heads = list(self._tied())

    @torch.inference_mode()
    def write(self, offered: Mapping[str, torch.Tensor]) -> None:
        """Every tensor of the model, or of this worker's part of it, on the host or on the parameters' device."""
        rows = self._rows()
        _settle(rows)
        near = [name for name in rows if offered[name].device.type == rows[name].device.type]
        if near:
            torch._foreach_copy_([rows[name] for name in near], [offered[name] for name in near])
        far = sorted(set(rows).difference(near))
        copy_to_device([offered[name] for name in far], [rows[name] for name in far])
        for rest in self._padding():
            rest.zero_()
        _settle(rows)

    @torch.inference_mode()
    def digests(self) -> dict[str, bytes]:
        """Name -> digest of the rows that vLLM computes with, summed where they are. Raises TwoMatrices when a tied
        head has another matrix than its embedding."""
        for head, table in self._heads:
            own, other = head.weight, self._modules[self._found[table].module].weight
            if (own.data_ptr(), own.shape, own.stride()) != (other.data_ptr(), other.shape, other.stride()):
                raise TwoMatrices(f"vLLM's output head computes with another matrix than {table}, which it is tied to")
        return tensor_digests_on(self._rows())

    def load(self, offered: Mapping[str, torch.Tensor], version: int, digest: str) -> str:
        """The digest of what vLLM then computes with."""
        self.write(offered)
        return self.read_back()

    def read_back(self) -> str:
        """The digest of what vLLM computes with now."""
        return combined_digest(self.digests())

    def _rows(self) -> dict[str, torch.Tensor]:
        return {name: self._parameter(place)[place.start : place.start + place.rows]
                for name, place in self._found.items()}

    def _padding(self) -> Iterator[torch.Tensor]:
        for place in self._ends:
            parameter, end = self._parameter(place), place.start + place.rows
            if len(parameter) > end:
                yield parameter[end:]

    def _parameter(self, place: Place) -> torch.Tensor:
        """As the module has it now."""
        parameter: torch.Tensor = getattr(self._modules[place.module], place.parameter)
        return parameter.data

    def _tied(self) -> Iterator[tuple[Any, str]]:
        try:
            yield from tied_heads(self._model, self._found)
        except KeyError as error:
            raise NotFoundInVllm("vLLM's output head has a matrix of its own, and the model has none for it") from error


def _ends(found: Iterable[Place]) -> list[Place]:
    """Of each parameter, the place of its last rows."""
    last: dict[tuple[str, str], Place] = {}
    for place in sorted(found, key=lambda place: place.start + place.rows):
        last[place.module, place.parameter] = place
    return list(last.values())


def _settle(rows: Mapping[str, torch.Tensor]) -> None:
    """Wait for the device: vLLM may compute on a stream of its own."""
    for device in {one.device for one in rows.values() if one.device.type == "cuda"}:
        torch.cuda.synchronize(device)
