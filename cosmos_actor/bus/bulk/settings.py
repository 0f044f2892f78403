"""Settings of the bulk plane."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BulkError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class BulkSettings:
    """Frozen; a value that cannot work is refused by name when the object is made."""

    budget_bytes: int = 1 * GIB
    """Bytes one actor may keep in shared memory; a put that does not fit waits. Memory is taken when first used."""
    threshold_bytes: int = 64 * KIB
    """A larger array field travels by reference; below it a copy through the socket is quicker than a lease."""
    prefault_bytes: int = 0
    """Bytes taken from the kernel at the start. The first touch of fresh memory costs about ten times a copy."""
    chunk_bytes: int = 4 * MIB
    """Piece of a stream between hosts, 1-16 MiB: smaller ones cost more a byte, 64 MiB messages are 4x slower."""
    window_chunks: int = 4
    """Chunks of one stream on their way: they fill 10 Gbit/s at a round trip of 10 ms, and others get a share."""
    streams: int = 4
    """Streams that one reader runs at a time; others wait their turn, inside their own deadline."""
    overdue_s: float = 5.0
    """Nothing of a stream arrived for this long: what is on its way counts as lost and is asked for again."""
    lost_s: float = 2.0
    """A connection that broke and is not up again after this long means that the owner is gone."""
    max_array_bytes: int = 16 * GIB
    """A reader refuses a larger array before it takes memory for it."""
    encrypt: bool = True
    """CURVE on the streams. Off: the bytes can be read on the network, but not changed (keyed digests stay)."""

    def __post_init__(self) -> None:
        _positive(self, "budget_bytes", "threshold_bytes", "window_chunks", "streams", "overdue_s", "lost_s",
                  "max_array_bytes")
        if not MIB <= self.chunk_bytes <= 16 * MIB:
            raise BulkError(f"bulk.chunk_bytes is 1 to 16 MiB, not {self.chunk_bytes}", setting="bulk.chunk_bytes")
        if not 0 <= self.prefault_bytes <= self.budget_bytes:
            raise BulkError("bulk.prefault_bytes is between 0 and bulk.budget_bytes", setting="bulk.prefault_bytes")


def _positive(settings: BulkSettings, *names: str) -> None:
    for name in names:
        if getattr(settings, name) <= 0:
            raise BulkError(f"bulk.{name} must be above 0, not {getattr(settings, name)}", setting=f"bulk.{name}")
