"""Standard output and error of an actor: they go to its log, and no failure of the log is a failure of the actor."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class LogFile(io.RawIOBase):
    """A descriptor to write to. Guarantee: writing never raises; what the file system refuses is counted and gone.

    On a full disk a `print`, a warning or the traceback of a failure would otherwise be a failure of its own, in the
    middle of whatever was to be reported.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.lost_bytes = 0

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = len(memoryview(data).cast("B"))
        try:
            return os.write(self._descriptor, data)
        except OSError:
            self.lost_bytes += size
            return size


def install() -> None:
    """From now on this process's standard output and error can not fail."""
    sys.stdout, sys.stderr = (_text(stream) for stream in (sys.stdout, sys.stderr))


def _text(stream: Any) -> io.TextIOWrapper:
    stream.flush()
    return io.TextIOWrapper(io.BufferedWriter(LogFile(stream.fileno())), encoding="utf-8", errors="backslashreplace",
                            line_buffering=True, write_through=True)
