"""Files of one JSON object a line: whole lines only, whatever kills the writer.

A line is appended by one write. A writer killed inside that write leaves a torn tail: readers skip it and the next
writer cuts it off.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BLOCK_BYTES = 64 * 1024


class JsonLinesWriter:
    """Appends objects to one file. After `append` returned, every reader on this host sees the whole line.

    Several processes may append to one file; each line stays whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._lines = 0
        self.repaired_bytes = _cut_torn_tail(self._fd)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. NaN and infinities become null, numpy scalars numbers; another type raises TypeError."""
        assert self._fd is not None, f"{self.path} is closed"
        line = json.dumps(_finite(record), default=_plain, allow_nan=False, ensure_ascii=False) + "\n"
        _write_all(self._fd, line.encode())
        self._lines += 1

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def statistics(self) -> dict[str, int]:
        return {"lines_appended": self._lines, "repaired_bytes": self.repaired_bytes}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file, also while it is written to; an absent file has none."""
    return follow_json_lines(path, 0)[0]


def follow_json_lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines from `offset` on, and the offset to go on from.

    A file that became shorter is read from its start.
    """
    try:
        with open(path, "rb") as file:
            if offset > os.fstat(file.fileno()).st_size:
                offset = 0
            file.seek(offset)
            whole = file.read().rpartition(b"\n")[0]
    except FileNotFoundError:
        return [], 0
    if not whole:
        return [], offset
    return [json.loads(line) for line in whole.split(b"\n") if line.strip()], offset + len(whole) + 1


def truncate_after_step(path: Path, step: int) -> int:
    """Cut the file from the first line whose `step` is greater than `step` on; the number of lines that went.

    In place, so that a writer that has the file open goes on after the cut. An absent file loses nothing.
    """
    if not path.exists():
        return 0
    with open(path, "r+b") as file:
        _cut_torn_tail(file.fileno())
        kept_bytes, dropped = 0, 0
        for line in file:
            if dropped or _step_of(line) > step:
                dropped += 1
            else:
                kept_bytes += len(line)
        file.truncate(kept_bytes)
    return dropped


def _step_of(line: bytes) -> float:
    return json.loads(line).get("step", -math.inf) if line.strip() else -math.inf


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data):]


def _cut_torn_tail(fd: int) -> int:
    """Drop what follows the last newline; the number of bytes that went."""
    size = os.fstat(fd).st_size
    whole = _end_of_last_line(fd, size)
    if whole < size:
        os.ftruncate(fd, whole)
    return size - whole


def _end_of_last_line(fd: int, size: int) -> int:
    """The offset behind the last newline of the file; 0 when there is none."""
    end = size
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    """numpy scalars and paths; json calls this for what it does not know."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return _finite(value.item())
    raise TypeError(f"{type(value).__name__} can not be written as JSON")
