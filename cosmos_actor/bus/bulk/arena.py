"""The memory itself: one memfd that its producer writes and that readers map without the right to write.

    byte 0           head: magic, 16 random bytes, first byte of the blocks, size of the arena
    page 1 ...       one 64-bit generation a page of block memory; 0: no living array begins there
    first_byte ...   blocks

No file system names a memfd: the kernel frees it with the last process that has it, however that one ends.
The size is sealed, so that no producer can make a reader's access fail; so is writing through any later mapping.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
from typing import TYPE_CHECKING, Any, Tuple

import numpy as np

from ..errors import BulkError, NoSharedMemory
from .allocator import PAGE_BYTES, block_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEAD = struct.Struct("<8s16sQQ")
MAGIC = b"cosmos-1"
CELL_BYTES = 8
MADV_POPULATE_WRITE = 23
# Linux 5.14. Where it is missing every page is touched instead.
F_SEAL_FUTURE_WRITE = 0x10
# Linux 5.1. Where it is missing readers are held by PROT_READ and their read-only descriptor alone.
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ArenaRefused(BulkError):
    """This arena cannot be mapped here; the text says why. Its owner may still be reachable by stream."""


def _limit_of(error: OSError) -> str:
    """The letter by which `ulimit` sets what refused an arena: the size of files, or of the address space."""
    return "f" if error.errno == errno.EFBIG else "v"


class Arena:
    """The producer's side: the only mapping in the system that can change the bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        """Room for `capacity_bytes` (rounded up to pages) of blocks; no memory is taken before it is touched."""
        self.capacity_bytes = block_bytes(capacity_bytes)
        table_bytes = block_bytes(self.capacity_bytes // PAGE_BYTES * CELL_BYTES)
        self.first_byte = PAGE_BYTES + table_bytes
        self.size_bytes = self.first_byte + self.capacity_bytes
        self.token = os.urandom(16)
        self.fd = os.memfd_create("cosmos-actor-bulk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            self._mapping = mmap.mmap(self.fd, self.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(self.fd)
            raise NoSharedMemory(
                f"no {self.size_bytes} bytes of shared memory are to be had ({error.strerror}): raise this process's "
                f"limit (`ulimit -{_limit_of(error)}`) or lower bulk.budget_bytes", setting="bulk.budget_bytes",
            ) from error
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)
        self._cells = _cells(self._mapping, self.first_byte)
        HEAD.pack_into(self._mapping, 0, MAGIC, self.token, self.first_byte, self.size_bytes)
        self._seal()

    def block(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The writable bytes of a block."""
        return self._bytes[offset:offset + nbytes]

    def view(self) -> memoryview:
        """All of its bytes, writable. Release it before `close`."""
        return memoryview(self._mapping)

    def mark(self, offset: int, generation: int) -> None:
        """From here on the block at `offset` is array `generation` (0: none) for every reader."""
        self._cells[(offset - self.first_byte) // PAGE_BYTES] = generation

    def fault_in(self, nbytes: int) -> None:
        """Take the memory of the first `nbytes` of the blocks from the kernel, so that the first puts need not."""
        if not nbytes:
            return
        try:
            self._mapping.madvise(MADV_POPULATE_WRITE, 0, self.first_byte + block_bytes(nbytes))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise BulkError(f"no memory for the first {nbytes} bytes of the bulk store: {error.strerror}",
                                setting="bulk.prefault_bytes") from error
            self._bytes[:self.first_byte + nbytes:PAGE_BYTES] |= 0

    def close(self) -> None:
        """Give the memory back, as soon as no array in this process looks at it."""
        del self._bytes, self._cells
        os.close(self.fd)
        del self._mapping

    def _seal(self) -> None:
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


class Viewed(np.ndarray):
    """Lives as long as any array made from it.

    numpy replaces the base of a view by the base's base as long as those are arrays of the view's type. This one is
    of another type and lies on the mapping itself, so it stays the base of its plain form and of all views of that.
    """


class ArenaView:
    """A reader's side: the whole arena of one peer, mapped once, read-only by page protection."""

    def __init__(self, pid: int, fd: int, token: bytes, size_bytes: int) -> None:
        """Raises ArenaRefused unless descriptor `fd` of process `pid` is the arena with this token and size."""
        self._path = f"/proc/{pid}/fd/{fd}"
        self.mapping, self._file = _map(self._path, size_bytes)
        if size_bytes < HEAD.size:
            raise ArenaRefused(f"descriptor {fd} of process {pid} is no arena: {size_bytes} bytes are none")
        magic, found, first_byte, size = HEAD.unpack_from(self.mapping, 0)
        if magic != MAGIC or found != token or size != size_bytes or not PAGE_BYTES < first_byte <= size:
            raise ArenaRefused(f"descriptor {fd} of process {pid} is another arena: the producer is gone")
        self.first_byte = int(first_byte)
        self._cells = _cells(self.mapping, self.first_byte)

    def generation(self, offset: int) -> int:
        """Of the living array that begins at `offset`; 0 when none does."""
        cell, rest = divmod(offset - self.first_byte, PAGE_BYTES)
        return int(self._cells[cell]) if rest == 0 and 0 <= cell < len(self._cells) else 0

    def array(self, offset: int, dtype: Any, shape: Any) -> Viewed:
        """A read-only array over the mapped bytes themselves. `ref.storage_dtype` has checked the numbers."""
        return Viewed(shape, dtype, self.mapping, offset)

    def orphaned(self) -> bool:
        """Whether the producer has ended: then nobody but the readers keeps this memory."""
        try:
            found = os.stat(self._path)
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != self._file

    def close(self) -> None:
        """Unmap, as soon as no array looks at it. Not by `mapping.close()`: it would not notice a `Viewed` on it."""
        del self._cells, self.mapping


def _cells(mapping: mmap.mmap, first_byte: int) -> NDArray[np.uint64]:
    return np.frombuffer(mapping, np.uint64, (first_byte - PAGE_BYTES) // CELL_BYTES, PAGE_BYTES)


def _map(path: str, size_bytes: int) -> Tuple[mmap.mmap, Tuple[int, int]]:
    """(read-only mapping, the file's identity)"""
    try:
        _check_file(os.stat(path), path, size_bytes)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ArenaRefused(f"{path}: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        _check_file(found, path, size_bytes)
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SIZE_SEALS != SIZE_SEALS:
            raise ArenaRefused(f"{path}: its size is not sealed")
        return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ), (found.st_dev, found.st_ino)
    except OSError as error:
        raise ArenaRefused(f"{path}: {error.strerror}") from None
    except (ValueError, OverflowError) as error:
        raise ArenaRefused(f"{path}: {error}") from None
    finally:
        os.close(fd)


def _check_file(found: os.stat_result, path: str, size_bytes: int) -> None:
    """A descriptor number that was used again may be anything; only a plain file of the right size is opened."""
    if not stat.S_ISREG(found.st_mode) or found.st_size != size_bytes:
        raise ArenaRefused(f"{path} is not an arena of {size_bytes} bytes: the producer is gone")
