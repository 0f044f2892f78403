"""What a simulator prints and asks, kept from whoever called the suite, and noticed."""

from __future__ import annotations

import ctypes
import io
import os
import sys
import tempfile
from typing import Any, Optional

KEPT_BYTES = 1 << 16
"""Of what was printed; the rest is only counted, since some simulators print at each step."""


class Stdio:
    """While it is entered, stdout leads nowhere and stdin has no answer (EOF). Can be entered again and again.

    `printed`, `printed_bytes` and `asked` add up over all times. Also what compiled code does to descriptors 0 and 1 is
    noticed.
    """

    def __init__(self) -> None:
        self.printed = b""
        self.printed_bytes = 0
        self.asked = 0
        # On descriptor 1 itself, wherever that leads: a simulator may keep it, as logging does.
        self._stdout = io.open(1, "w", buffering=1, errors="backslashreplace", closefd=False)
        self._stdin = _Nobody(self)

    def __enter__(self) -> Stdio:
        sys.stdout.flush()
        self._streams = sys.stdin, sys.stdout
        self._saved = os.dup(0), os.dup(1)
        self._sink = tempfile.TemporaryFile()
        # One byte that nobody is to read. What reads it finds the end of the file next.
        self._bait, writes = os.pipe()
        os.write(writes, b"\n")
        os.close(writes)
        os.dup2(self._bait, 0)
        os.dup2(self._sink.fileno(), 1)
        sys.stdin, sys.stdout = self._stdin, self._stdout
        return self

    def __exit__(self, *raised: Any) -> None:
        for stream in (sys.stdout, self._stdout, sys.__stdout__):
            _flush(stream)
        ctypes.CDLL(None).fflush(None)
        sys.stdin, sys.stdout = self._streams
        for number, saved in enumerate(self._saved):
            os.dup2(saved, number)
            os.close(saved)
        self.asked += not os.read(self._bait, 1)
        os.close(self._bait)
        self.printed_bytes += self._sink.seek(0, os.SEEK_END)
        self._sink.seek(0)
        self.printed += self._sink.read(KEPT_BYTES - len(self.printed))
        self._sink.close()

    @property
    def first_line(self) -> str:
        """Of what was printed, as it can be shown."""
        lines = [line.strip() for line in self.printed.decode(errors="replace").splitlines()]
        return next((repr(line[:80]) for line in lines if line), "nothing but blanks")


class _Nobody(io.TextIOBase):
    """A stdin that has come to its end, and counts who wanted more."""

    def __init__(self, stdio: Stdio) -> None:
        self._stdio = stdio

    def readable(self) -> bool:
        return True

    def read(self, size: Optional[int] = -1) -> str:
        self._stdio.asked += 1
        return ""

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        return self.read()


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):
        pass  # none, or closed: it holds nothing back
