"""What each tensor-parallel rank of an engine needs of a checkpoint's tensors, by vLLM's rules. No torch, no vLLM.

    column parallel   rows, a part each                 q, k, v, gate, up and their biases
    row parallel      columns, a part each; bias whole  o, down
    vocabulary        rows of the padded vocabulary     embedding, head; the padding is zero
    joined            parts of several tensors under one another: qkv_proj, gate_up_proj
    whole             on every rank                     norms

Key and value heads that are fewer than the ranks are each on several of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cosmos_actor.weight_plane.reshard import Box, CanNotReshard, Destination, Need, along, shape_of, whole

VOCABULARY_PADDING = 64
"""vLLM rounds the rows of a vocabulary up to a multiple of this before it cuts them."""
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""A joined layer of the models that are as Llama is, and what a checkpoint has in its place."""
COLUMNS = ("o_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class Cut:
    """One rank's place among `ranks`, and the boxes of whole tensors that are its part."""

    rank: int
    ranks: int

    def rows(self, name: str, shape: Sequence[int], copies: int = 1) -> Box:
        """A part of the rows; with `copies`, so many neighbouring ranks have the same part."""
        return self._even(name, shape, 0, copies)

    def columns(self, name: str, shape: Sequence[int]) -> Box:
        """A part of the last dimension."""
        return self._even(name, shape, len(shape) - 1, 1)

    def vocabulary(self, name: str, shape: Sequence[int], padding: int = VOCABULARY_PADDING) -> tuple[Box, int]:
        """(the rows that are this rank's, which may be none, and how many rows its parameter has)."""
        padded = -(-shape[0] // padding) * padding
        if padded % self.ranks:
            raise CanNotReshard(f"{name}: {padded} padded rows are not cut into {self.ranks} equal parts")
        step = padded // self.ranks
        start, stop = (min(shape[0], step * number) for number in (self.rank, self.rank + 1))
        return along(shape, 0, start, stop), step

    def copies_of(self, name: str, heads: int) -> int:
        """On how many ranks each of `heads` key or value heads is."""
        if self.ranks % heads and heads % self.ranks:
            raise CanNotReshard(f"{name}: {heads} heads go neither into nor onto {self.ranks} ranks")
        return max(1, self.ranks // heads)

    def _even(self, name: str, shape: Sequence[int], dim: int, copies: int) -> Box:
        parts = self.ranks // copies
        if shape[dim] % parts:
            raise CanNotReshard(f"{name} of {list(shape)} is not cut into {parts} equal parts along dimension {dim}")
        step = shape[dim] // parts
        start = self.rank // copies * step
        return along(shape, dim, start, start + step)


def engine_ranks(shapes: Mapping[str, tuple[int, ...]], ranks: int, *, heads: int, kv_heads: int,
                 padding: int = VOCABULARY_PADDING) -> list[Destination]:
    """The ranks of an engine for a checkpoint with tensors of these shapes, named as those of Llama are.

    A tied head is not among the tensors, and needs nothing. Raises CanNotReshard for what vLLM does not cut either.
    """
    if heads % ranks:
        raise CanNotReshard(f"{heads} attention heads are not cut into {ranks} equal parts")
    return [_rank(shapes, Cut(rank, ranks), kv_heads, padding) for rank in range(ranks)]


def _rank(shapes: Mapping[str, tuple[int, ...]], cut: Cut, kv_heads: int, padding: int) -> Destination:
    made = Destination()
    below: dict[str, int] = {}
    for name in _joined_in_order(shapes):
        parameter = parameter_of(name)
        box, rows = _part(name, shapes[name], cut, kv_heads, padding)
        first = below.get(parameter, 0)
        extent = shape_of(box)
        target = ((first, first + extent[0]), *whole(extent[1:])) if extent else ()
        below[parameter] = first + (extent[0] if extent else 0)
        made.needs.append(Need(name, box, parameter, target))
        made.parameters[parameter] = (max(rows, below[parameter]), *extent[1:]) if extent else ()
    return made


def parameter_of(name: str) -> str:
    """The engine's parameter that a tensor goes to, by the tensor's name."""
    path, _, kind = name.rpartition(".")
    parent, _, own = path.rpartition(".")
    for joined, parts in JOINED.items():
        if own in parts:
            return f"{parent}.{joined}.{kind}" if parent else f"{joined}.{kind}"
    return name


def _joined_in_order(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """As given, but the parts of a joined layer next to one another, in the order in which they lie in it."""
    place = {part: number for parts in JOINED.values() for number, part in enumerate(parts)}
    first: dict[str, int] = {}
    for number, name in enumerate(shapes):
        first.setdefault(parameter_of(name), number)
    return sorted(shapes, key=lambda name: (first[parameter_of(name)], place.get(_layer(name), 0)))


def _layer(name: str) -> str:
    return name.rsplit(".", 2)[-2] if "." in name else ""


def _part(name: str, shape: tuple[int, ...], cut: Cut, kv_heads: int, padding: int) -> tuple[Box, int]:
    """(the part of the tensor, the rows that its parameter has at least)."""
    layer, bias = _layer(name), name.endswith(".bias")
    if layer in VOCABULARY:
        return cut.vocabulary(name, shape, padding)
    if layer in COLUMNS and not bias:
        return cut.columns(name, shape), 0
    if layer in ("k_proj", "v_proj"):
        return cut.rows(name, shape, cut.copies_of(name, kv_heads)), 0
    if layer in ("q_proj", "gate_proj", "up_proj"):
        return cut.rows(name, shape), 0
    return whole(shape), 0
