"""Who sends which part of a tensor to whom: from the trainer's shards to the ranks of an engine, no model gathered.

    trainer (FSDP2, HSDP or replicated)                     engine (tensor parallel)
    rank 0 [rows 0-2] ─┬── copy, copy ──────────────────>   rank 0  qkv_proj, o_proj[:, :half], ...
    rank 1 [rows 3-5] ─┴── copy ─────────────────────────>  rank 1  ...

A pure planner: no torch, no network. Every element of a destination is written by exactly one copy (or by nobody, where
it is padding), so what a destination is sent is what it needs and not a byte more. A tensor that several ranks hold is
sent by the one that has the least to send, a large one by all of them together. `engine_layout` says what an engine's
ranks need.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from cosmos_actor.weight_plane.errors import WeightError

Box = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension."""
SPLIT_ELEMENTS = 1 << 18
"""A copy of so many is worth sharing among those that hold it; of fewer, messages would only become more."""


class CanNotReshard(WeightError):
    """A tensor can not be cut as the engine or the trainer would have it; no plan was made."""


@dataclass(frozen=True)
class Mesh:
    """The trainer's ranks, `replicas` groups of `shards` each: rank = group * shards + shard.

    FSDP2: one group. HSDP: several. Plain data parallel: groups of one.
    """

    replicas: int
    shards: int

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards


@dataclass(frozen=True)
class Held:
    """How the ranks of a mesh hold one tensor: cut along `dim` within each group, or whole on every rank."""

    shape: tuple[int, ...]
    dim: int | None

    def boxes(self, mesh: Mesh) -> list[Box]:
        """What each shard of a group has: equal parts, the last ones smaller or empty, as torch.chunk cuts."""
        if self.dim is None:
            return [whole(self.shape)] * mesh.shards
        size = self.shape[self.dim]
        step = -(-size // mesh.shards)
        cuts = [min(size, number * step) for number in range(mesh.shards + 1)]
        return [along(self.shape, self.dim, start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]

    def holders(self, mesh: Mesh) -> list[tuple[Box, list[int]]]:
        """Each part with the ranks that have it; together the tensor, each element in one of the parts."""
        if self.dim is None:
            return [(whole(self.shape), list(range(mesh.ranks)))]
        return [(box, [group * mesh.shards + shard for group in range(mesh.replicas)])
                for shard, box in enumerate(self.boxes(mesh))]


@dataclass(frozen=True)
class Need:
    """`source` of a whole tensor goes to `target` of a parameter; the two have the same shape."""

    tensor: str
    source: Box
    parameter: str
    target: Box


@dataclass
class Destination:
    """One rank of an engine: its parameters by name, and what goes where in them. The rest of them is zero."""

    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    needs: list[Need] = field(default_factory=list)

    def elements(self) -> int:
        """The rank's share: how many elements it must be sent."""
        return sum(size(need.source) for need in self.needs)


@dataclass(frozen=True)
class Copy:
    """`source` of the sender's own shard of a tensor goes to `target` of the receiver's parameter."""

    tensor: str
    source: Box
    parameter: str
    target: Box


Plan = dict[tuple[int, int], list[Copy]]
"""(trainer rank, number of the destination) -> what the one sends the other, in one order on both sides."""


def plan_copies(held: Mapping[str, Held], mesh: Mesh, destinations: Sequence[Destination]) -> Plan:
    """The same plan on every rank that makes it from the same arguments.

    Raises CanNotReshard when a destination needs what the trainer does not have.
    """
    plan: Plan = defaultdict(list)
    sent = [0] * mesh.ranks
    parts = {name: tensor.holders(mesh) for name, tensor in held.items()}
    for number, destination in enumerate(destinations):
        for need in destination.needs:
            if need.tensor not in held or not inside(need.source, whole(held[need.tensor].shape)):
                raise CanNotReshard(f"destination {number} needs {need.source} of {need.tensor}, which the trainer "
                                    f"has {'not' if need.tensor not in held else held[need.tensor].shape}")
            for box, ranks in parts[need.tensor]:
                for piece, rank in _shared_out(overlap(need.source, box), ranks, sent):
                    plan[rank, number].append(Copy(need.tensor, relative(piece, box), need.parameter,
                                                   moved(piece, need.source, need.target)))
                    sent[rank] += size(piece)
    return dict(plan)


def _shared_out(piece: Box | None, ranks: Sequence[int], sent: Sequence[int]) -> Iterable[tuple[Box, int]]:
    """`piece` among `ranks`, who all have it: by the one that has sent least, or a large one by all in equal parts."""
    if piece is None:
        return
    longest = max(range(len(piece)), key=lambda dim: piece[dim][1] - piece[dim][0], default=0)
    least_first = sorted(ranks, key=lambda rank: (sent[rank], rank))
    if size(piece) < SPLIT_ELEMENTS or len(ranks) == 1:
        yield piece, least_first[0]
        return
    start, stop = piece[longest]
    cuts = [start + (stop - start) * number // len(ranks) for number in range(len(ranks) + 1)]
    for rank, low, high in zip(least_first, cuts, cuts[1:], strict=False):
        if high > low:
            yield (*piece[:longest], (low, high), *piece[longest + 1:]), rank


def pieces_of(shard: Mapping[str, Any], copies: Iterable[Copy]) -> list[Any]:
    """At the sender: the arrays of `copies`, numpy or torch; views of its shard, not contiguous where it is cut so."""
    return [shard[copy.tensor][index(copy.source)] for copy in copies]


def write(parameters: Mapping[str, Any], copies: Iterable[Copy], pieces: Iterable[Any]) -> None:
    """At the receiver: put `pieces` where `copies` say."""
    for copy, piece in zip(copies, pieces, strict=True):
        parameters[copy.parameter][index(copy.target)] = piece


def carry_out(plan: Plan, shards: Sequence[Mapping[str, Any]], parameters: Sequence[Mapping[str, Any]]) -> None:
    """The whole plan where all of it is in one process. shards: by trainer rank; parameters: by destination."""
    for (rank, number), copies in plan.items():
        write(parameters[number], copies, pieces_of(shards[rank], copies))


def bytes_received(plan: Plan, number: int, itemsizes: Mapping[str, int]) -> int:
    """What one destination is sent in all. itemsizes: bytes of one element, by tensor."""
    return sum(size(copy.source) * itemsizes[copy.tensor]
               for (_, to), copies in plan.items() if to == number for copy in copies)


def bytes_sent(plan: Plan, rank: int, itemsizes: Mapping[str, int]) -> int:
    """What one trainer rank sends in all."""
    return sum(size(copy.source) * itemsizes[copy.tensor]
               for (sender, _), copies in plan.items() if sender == rank for copy in copies)


def held_by(tensors: Mapping[str, Any]) -> tuple[Mesh, dict[str, Held]]:
    """How torch's DTensors (and plain tensors, which every rank has whole) are held; all of one mesh.

    Raises CanNotReshard for a layout that FSDP2 and HSDP do not make.
    """
    mesh, found = None, {}
    for name, tensor in tensors.items():
        placements = getattr(tensor, "placements", None)
        if placements is None:
            found[name] = Held(tuple(tensor.shape), None)
            continue
        own = _mesh_of(name, tensor.device_mesh.shape)
        if mesh is not None and own != mesh:
            raise CanNotReshard(f"{name} is on {own}, tensors before it on {mesh}")
        mesh = own
        found[name] = Held(tuple(tensor.shape), _dim_of(name, placements, own))
    return mesh or Mesh(1, 1), found


def _mesh_of(name: str, sizes: Sequence[int]) -> Mesh:
    if len(sizes) not in (1, 2):
        raise CanNotReshard(f"{name} is on a mesh of {len(sizes)} dimensions; FSDP2 has one, HSDP two")
    return Mesh(1 if len(sizes) == 1 else int(sizes[0]), int(sizes[-1]))


def _dim_of(name: str, placements: Sequence[Any], mesh: Mesh) -> int | None:
    *outer, last = placements
    plain = all(placement.is_replicate() for placement in outer)
    if plain and last.is_replicate():
        return None
    if not plain or type(last).__name__ != "Shard":  # a strided shard is cut in another order
        raise CanNotReshard(f"{name} is placed as {tuple(placements)} on {mesh}, which is no FSDP2 or HSDP")
    return int(last.dim)


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, length) for length in shape)


def along(shape: Sequence[int], dim: int, start: int, stop: int) -> Box:
    """All of `shape`, but only `start` to `stop` along `dim`."""
    return tuple((start, stop) if number == dim else (0, length) for number, length in enumerate(shape))


def size(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def inside(box: Box, other: Box) -> bool:
    return len(box) == len(other) and all(
        low <= start <= stop <= high for (start, stop), (low, high) in zip(box, other, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """What is in both; None where that is nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(box: Box, origin: Box) -> Box:
    """`box`, which is inside `origin`, counted from the corner of that."""
    return tuple((start - low, stop - low) for (start, stop), (low, _) in zip(box, origin, strict=True))


def moved(box: Box, source: Box, target: Box) -> Box:
    """Where `box` of `source` lies in `target`."""
    return tuple((start - low + to, stop - low + to)
                 for (start, stop), (low, _), (to, _) in zip(box, source, target, strict=True))
