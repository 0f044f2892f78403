"""A version as what changed since another: which elements, and by how much, lossless. Pure: bytes in, bytes out.

    magic | length | header (msgpack) | frames (zstd each)
    header: base, version, their digests, then one row a part: unit, first block, changes, lengths of its frames
    part:   [gaps between changed units] [lowest byte of each difference] [the next byte] ...   (empty: zeros)

A unit is an element, or half of one of 8 bytes. What a training step changes is one unit in the last place of one
element in a hundred, so a gap is a byte, a difference is a bit after compression, and the higher bytes of differences
are zeros. Places are those of a `Layout`, in which all tensors lie one after the other: most tensors of a model are so
small that each by itself would cost more than its bytes.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cosmos_actor.bus import schema
from cosmos_actor.weight_plane.digest import BLOCK_BYTES, block_count
from cosmos_actor.weight_plane.errors import DeltaInvalid

MAGIC = b"CAD1"
SPAN_BLOCKS = 512
"""Of a part: 32 MiB of the model. A few hundred thousand changes at most, which stay in the processor's cache, and few
enough parts that calling numpy costs nothing."""
LEVEL = 1
"""Of zstd. Gaps are nearly random: a higher level takes several times as long for a few percent."""
ESCAPE = 255
"""A gap byte that says: so many more, and the next byte too."""
_of_thread = threading.local()
"""Compressor and decompressor: to make one takes longer than most parts do, and two threads can not share it."""
UNITS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


class Place(NamedTuple):
    """Of one tensor."""

    block: int
    unit: int
    """Bytes."""
    nbytes: int


class Layout:
    """Where each tensor lies if all lie in one buffer: by size of unit, then by name, each at a block of the digest."""

    def __init__(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """sizes: name -> (bytes, bytes of an element)."""
        self.places: dict[str, Place] = {}
        self.regions: dict[int, tuple[int, int]] = {}
        """Unit -> (first block, end) of the tensors that consist of it."""
        self.blocks = 0
        for name in sorted(sizes, key=lambda name: (min(sizes[name][1], 4), name)):
            nbytes, unit = sizes[name][0], min(sizes[name][1], 4)
            self.places[name] = Place(self.blocks, unit, nbytes)
            begin = self.regions.get(unit, (self.blocks, 0))[0]
            self.blocks += block_count(nbytes)
            self.regions[unit] = (begin, self.blocks)


class Changes(NamedTuple):
    """Of units of one size, from one block on."""

    unit: int
    block: int
    positions: np.ndarray
    """[n] int64, ascending, in units from the block's beginning."""
    differences: np.ndarray
    """[n] unsigned integers: new minus old, modulo the unit's range."""


class Part(NamedTuple):
    """`Changes`, compressed."""

    unit: int
    block: int
    count: int
    frames: list[bytes]


@dataclass(frozen=True)
class Delta:
    """From `base` to `version`, each by (epoch, step) and by digest."""

    base: tuple[int, int]
    version: tuple[int, int]
    base_digest: str
    digest: str
    parts: list[Part]

    @property
    def changed(self) -> int:
        """Units."""
        return sum(part.count for part in self.parts)


def unavailable() -> str:
    """Why deltas can not be used here; empty: they can."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        return "the package zstandard is not installed"
    return ""


def units_of(payload: np.ndarray, itemsize: int) -> np.ndarray:
    """[units] unsigned view of a tensor's bytes ([nbytes] uint8)."""
    return payload.view(UNITS[min(itemsize, 4)])


def changed(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """[n] int64, ascending: where two arrays of one kind of unit differ. Compares eight bytes at a time."""
    per = 8 // old.itemsize
    whole = len(old) // per * per
    old_wide, new_wide = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    wide = np.flatnonzero(old_wide != new_wide)
    inside = np.flatnonzero((old_wide[wide] ^ new_wide[wide]).view(old.dtype) != 0)
    found = wide[inside // per] * per + inside % per
    if whole == len(old):
        return found
    return np.concatenate([found, whole + np.flatnonzero(old[whole:] != new[whole:])])


def in_spans(found: Iterable[Changes]) -> Iterator[Changes]:
    """The same changes, in the order of the layout, in pieces that each make one part."""
    by_unit: dict[int, list[Changes]] = {}
    for changes in found:
        by_unit.setdefault(changes.unit, []).append(changes)
    for unit, several in by_unit.items():
        per_block = BLOCK_BYTES // unit
        places = np.concatenate([changes.positions + changes.block * per_block for changes in several])
        differences = np.concatenate([changes.differences for changes in several])
        length = SPAN_BLOCKS * per_block
        numbers = range(int(places[0]) // length, int(places[-1]) // length + 1) if len(places) else range(0)
        for number in numbers:
            first, last = np.searchsorted(places, [number * length, (number + 1) * length])
            if first < last:
                inside = places[first:last] - number * length
                yield Changes(unit, number * SPAN_BLOCKS, inside, differences[first:last])


def compress(changes: Changes) -> Part:
    """The part that these changes are."""
    planes = _zigzag(changes.differences).reshape(-1, 1).view(np.uint8).T
    frames = [_compressed(_gap_bytes(changes.positions))]
    frames += [_compressed(np.ascontiguousarray(plane)) if plane.any() else b"" for plane in planes]
    return Part(changes.unit, changes.block, len(changes.positions), frames)


def expand(part: Part, layout: Layout) -> Changes:
    """What was compressed. Raises DeltaInvalid for what can not be in this layout."""
    unit, region = UNITS.get(part.unit), layout.regions.get(part.unit)
    if unit is None or region is None or len(part.frames) != 1 + part.unit:
        raise DeltaInvalid(f"a part has units of {part.unit} bytes, which no tensor has")
    per_block = BLOCK_BYTES // part.unit
    least, end = ((block - part.block) * per_block for block in region)
    room = min(SPAN_BLOCKS * per_block, end)
    if not 0 < part.count <= room or part.block < 0 or part.block % SPAN_BLOCKS:
        raise DeltaInvalid(f"{part.count} changes from block {part.block} of {region[1]} can not be")
    positions = _positions(_frame(part, 0, part.count, part.count + room // ESCAPE + 1))
    if len(positions) != part.count or positions[0] < least or positions[-1] >= room:
        raise DeltaInvalid(f"{part.count} changes were announced, or one lies outside its part")
    planes = np.zeros((part.count, part.unit), np.uint8)
    for number in range(part.unit):
        if part.frames[1 + number]:
            planes[:, number] = _frame(part, 1 + number, part.count, part.count)
    return Changes(part.unit, part.block, positions, _unzigzag(planes.view(unit.newbyteorder("<"))[:, 0], unit))


def pack(delta: Delta) -> np.ndarray:
    """[nbytes] uint8: what travels."""
    rows = [[part.unit, part.block, part.count, [len(frame) for frame in part.frames]] for part in delta.parts]
    facts = [list(delta.base), list(delta.version), delta.base_digest, delta.digest, rows]
    header = schema.pack(facts)
    frames = [frame for part in delta.parts for frame in part.frames]
    return np.frombuffer(b"".join([MAGIC, struct.pack("<I", len(header)), header, *frames]), np.uint8)


def unpack(payload: np.ndarray) -> Delta:
    """What was packed; the frames are not looked into. Raises DeltaInvalid."""
    data = payload.tobytes()
    if data[:4] != MAGIC or len(data) < 8:
        raise DeltaInvalid("these bytes are no delta")
    end = 8 + struct.unpack_from("<I", data, 4)[0]
    if end > len(data):
        raise DeltaInvalid("the delta is cut off in its header")
    try:
        base, version, base_digest, digest, rows = schema.unpack(data[8:end])
        parts = []
        for unit, block, count, lengths in rows:
            frames = []
            for length in lengths:
                frames.append(data[end : end + length])
                end += length
            parts.append(Part(int(unit), int(block), int(count), frames))
        made = Delta((int(base[0]), int(base[1])), (int(version[0]), int(version[1])), str(base_digest), str(digest),
                     parts)
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise DeltaInvalid(f"the delta's header can not be read: {error}") from error
    if end != len(data):
        raise DeltaInvalid(f"the delta has {len(data)} bytes, its header speaks of {end}")
    return made


def check_order(delta: Delta) -> None:
    """Raises DeltaInvalid unless every part is there once: what two parts wrote could not be told from their sums."""
    places = [(part.unit, part.block) for part in delta.parts]
    if any(after <= before for before, after in zip(places, places[1:], strict=False)):
        raise DeltaInvalid("the parts of the delta are out of order")


def _gap_bytes(positions: np.ndarray) -> np.ndarray:
    gaps = np.diff(positions, prepend=-1) - 1
    if not len(gaps) or gaps.max() < ESCAPE:
        return gaps.astype(np.uint8)
    more, rest = np.divmod(gaps, ESCAPE)
    ends = np.cumsum(more + 1)
    stream = np.full(ends[-1], ESCAPE, np.uint8)
    stream[ends - 1] = rest
    return stream


def _positions(stream: np.ndarray) -> np.ndarray:
    """[n] int64. An escape moves on by as much as it says, any other byte by one more than it says."""
    last = stream != ESCAPE
    reached = np.cumsum(stream.astype(np.int64) + last)
    return (reached if last.all() else reached[last]) - 1


def _zigzag(differences: np.ndarray) -> np.ndarray:
    """0, -1, 1, -2, 2, ... become 0, 1, 2, 3, 4, ..."""
    signed = differences.view(differences.dtype.str.replace("u", "i"))
    bits = 8 * differences.itemsize - 1
    return np.ascontiguousarray((signed << 1) ^ (signed >> bits)).view(differences.dtype)


def _unzigzag(coded: np.ndarray, unit: np.dtype[Any]) -> np.ndarray:
    one = unit.type(1)
    return (coded >> one) ^ (~(coded & one) + one)


def _frame(part: Part, number: int, least: int, most: int) -> np.ndarray:
    try:
        found = np.frombuffer(_decompressed(part.frames[number], most), np.uint8)
    except ValueError as error:
        raise DeltaInvalid(f"block {part.block}: {error}") from error
    if len(found) < least:
        raise DeltaInvalid(f"block {part.block}: a frame holds {len(found)} bytes in the place of {least}")
    return found


def _compressed(stream: np.ndarray) -> bytes:
    if not hasattr(_of_thread, "compressor"):
        import zstandard

        _of_thread.compressor = zstandard.ZstdCompressor(level=LEVEL)
    return bytes(_of_thread.compressor.compress(stream.data))


def _decompressed(frame: bytes, most: int) -> bytes:
    """Raises ValueError; never makes more than `most` bytes."""
    import zstandard

    if not hasattr(_of_thread, "decompressor"):
        _of_thread.decompressor = zstandard.ZstdDecompressor()
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= most:
            raise ValueError(f"a frame of {size} bytes, where {most} is the most")
        return bytes(_of_thread.decompressor.decompress(frame))
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame can not be read: {error}") from error
