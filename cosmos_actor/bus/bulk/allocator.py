"""Where a block lies in the arena. Pure: numbers in, numbers out, no memory is touched."""

from __future__ import annotations

from bisect import bisect_left
from typing import Dict, List, Optional

PAGE_BYTES = 4096
# Blocks start on pages: an array is aligned for any vector instruction, and the page number names the block.


class FreeList:
    """Blocks never overlap nor pass the capacity, and what was freed is one hole again with its neighbours.

    First fit at the lowest address: pages that were touched once are used again before fresh ones are.
    """

    def __init__(self, capacity_bytes: int, *, first_byte: int = 0) -> None:
        """Blocks lie in [first_byte, first_byte + capacity_bytes), both on pages. Raises ValueError otherwise."""
        if capacity_bytes <= 0 or capacity_bytes % PAGE_BYTES or first_byte % PAGE_BYTES:
            raise ValueError(f"an arena is whole pages of {PAGE_BYTES} bytes, not {capacity_bytes} from {first_byte}")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.high_water_byte = first_byte
        self._hole_starts: List[int] = [first_byte]
        self._hole_sizes: Dict[int, int] = {first_byte: capacity_bytes}
        self._blocks: Dict[int, int] = {}

    def allocate(self, nbytes: int) -> Optional[int]:
        """The first byte of a block of at least `nbytes`, or None when no hole is large enough now."""
        size = block_bytes(nbytes)
        for index, start in enumerate(self._hole_starts):
            if self._hole_sizes[start] >= size:
                self._shrink_hole(index, start, size)
                return self._hand_out(start, size)
        return None

    def free(self, start: int) -> int:
        """Take a block back; its size in bytes. Raises KeyError for a byte that is no block's first."""
        size = self._blocks.pop(start)
        self.used_bytes -= size
        self._add_hole(start, size)
        return size

    def fits_when_empty(self, nbytes: int) -> bool:
        """Whether waiting can help at all."""
        return block_bytes(nbytes) <= self.capacity_bytes

    def statistics(self) -> Dict[str, int]:
        return {
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": self.used_bytes,
            "blocks": len(self._blocks),
            "holes": len(self._hole_starts),
            "largest_hole_bytes": max(self._hole_sizes.values(), default=0),
            "high_water_byte": self.high_water_byte,
        }

    def _hand_out(self, start: int, size: int) -> int:
        self._blocks[start] = size
        self.used_bytes += size
        self.high_water_byte = max(self.high_water_byte, start + size)
        return start

    def _shrink_hole(self, index: int, start: int, size: int) -> None:
        rest = self._hole_sizes.pop(start) - size
        if rest:
            self._hole_starts[index] = start + size
            self._hole_sizes[start + size] = rest
        else:
            del self._hole_starts[index]

    def _add_hole(self, start: int, size: int) -> None:
        index = bisect_left(self._hole_starts, start)
        if index < len(self._hole_starts) and self._hole_starts[index] == start + size:
            size += self._hole_sizes.pop(self._hole_starts.pop(index))
        if index and self._end_of_hole(index - 1) == start:
            self._hole_sizes[self._hole_starts[index - 1]] += size
        else:
            self._hole_starts.insert(index, start)
            self._hole_sizes[start] = size

    def _end_of_hole(self, index: int) -> int:
        start = self._hole_starts[index]
        return start + self._hole_sizes[start]


def block_bytes(nbytes: int) -> int:
    """Bytes of the block that holds `nbytes`: whole pages, one at least."""
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
