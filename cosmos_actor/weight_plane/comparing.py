"""One pass over a new version, on several threads: its digests, and what changed since the version before.

The digests are of the new bytes themselves, never of the old ones with the changes added: who applies the delta
compares what it came to with something that was found without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cosmos_actor.weight_plane.delta import Changes, Layout, Part, changed, compress, in_spans, units_of
from cosmos_actor.weight_plane.digest import BLOCK_BYTES, digest_of_sums, no_sums, raw, stored, sum_into, threads

PIECE_BYTES = 32 * BLOCK_BYTES
"""2 MiB, so that what is compared is summed while it lies in the processor's cache."""
MOST_CHANGED = 0.25
"""Of all units. A delta takes about 1.1 bytes a changed unit, and each costs more work than its bytes in a full version
do: beyond this there is little to win."""


class Piece(NamedTuple):
    """A part of one tensor: its bytes now, and before if they are to be compared."""

    tensor: str
    block: int
    """Of the tensor."""
    new: np.ndarray
    old: np.ndarray | None


@dataclass
class Compared:
    """What was found."""

    digests: dict[str, bytes]
    parts: list[Part] = field(default_factory=list)
    """Those with changes, in order."""
    units: int = 0
    changed: int = 0
    """Units; if there are too many, those found until then."""

    @property
    def too_many(self) -> bool:
        return self.changed > MOST_CHANGED * self.units


def compare(tensors: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray] | None,
            digests: Mapping[str, bytes] | None = None) -> Compared:
    """base: name -> [nbytes] uint8 of the version before, with the same names and sizes; None: digests alone.

    With `digests`, computed where the tensors came from, none are computed here.
    """
    plain = {name: stored(array) for name, array in tensors.items()}
    sums = {name: no_sums(array.nbytes) for name, (_, array) in plain.items()}
    layout = Layout({name: (array.nbytes, array.itemsize) for name, (_, array) in plain.items()})
    found = Compared(dict(digests or {}))
    if base is not None:
        found.units = sum(place.nbytes // place.unit for place in layout.places.values())

    def look(piece: Piece) -> Changes | None:
        if digests is None:
            sum_into(sums[piece.tensor], piece.new, piece.block)
        return None if piece.old is None or found.too_many else _changes_of(piece, layout, found)

    if digests is None or base is not None:
        pieces = _pieces({name: raw(plain[name][1]) for name in layout.places}, base)
        changes = [one for one in threads().map(look, pieces) if one is not None]
        if not found.too_many:
            found.parts = list(threads().map(compress, in_spans(changes)))
    if digests is None:
        found.digests = {name: digest_of_sums(kind, array.shape, sums[name]) for name, (kind, array) in plain.items()}
    return found


def _pieces(payloads: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray] | None) -> Iterator[Piece]:
    for name, new in payloads.items():
        for first in range(0, new.nbytes, PIECE_BYTES):
            old = None if base is None else base[name][first : first + PIECE_BYTES]
            yield Piece(name, first // BLOCK_BYTES, new[first : first + PIECE_BYTES], old)


def _changes_of(piece: Piece, layout: Layout, found: Compared) -> Changes:
    place = layout.places[piece.tensor]
    old, new = units_of(piece.old, place.unit), units_of(piece.new, place.unit)
    positions = changed(old, new)
    found.changed += len(positions)  # Two threads may lose a count between them; it is a limit, not a sum.
    return Changes(place.unit, place.block + piece.block, positions, new[positions] - old[positions])
