"""Files of one JSON object a line: whole lines only, whatever kills the writer.

A line is appended by one write. A writer killed inside that write leaves a torn tail: readers skip it and the next
writer cuts it off.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cosmos_actor.actors.disk import named
from cosmos_actor.actors.errors import UserError

BLOCK_BYTES = 64 * 1024


class JsonLinesWriter:
    """Appends objects to one file. After `append` returned, every reader on this host sees the whole line.

    A line that the file system refuses is an OSError with the file's name, and nothing of it stays. Several processes
    may append to one file; each line stays whole.
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
        try:
            _write_all(self._fd, line.encode())
        except OSError as error:  # a full disk may have taken the beginning of the line
            _cut_torn_tail(self._fd)
            raise named(error, self.path) from error
        self._lines += 1

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def statistics(self) -> dict[str, int]:
        return {"lines_appended": self._lines, "repaired_bytes": self.repaired_bytes}


class ForgivingWriter:
    """Appends lines that are only told, not needed: what the file system refuses is counted, never raised.

    `on_trouble` hears of the first loss, and of the first after lines could be written again.
    """

    def __init__(self, writer: JsonLinesWriter, on_trouble: Callable[[str], None]) -> None:
        self._writer, self._on_trouble = writer, on_trouble
        self._well = True
        self.lost = 0

    def append(self, record: Mapping[str, Any]) -> None:
        try:
            self._writer.append(record)
            self._well = True
        except OSError as error:
            self.lost += 1
            if self._well:
                self._on_trouble(f"{self._writer.path} can not be written: {error.strerror}")
            self._well = False


class DamagedLine(UserError):
    """A whole line that is no JSON object; says where."""


def read_json_lines(path: Path, *, skip_damaged: bool = False) -> list[dict[str, Any]]:
    """All whole lines of a file, also while it is written to; an absent file has none."""
    return follow_json_lines(path, 0, skip_damaged=skip_damaged)[0]


def follow_json_lines(path: Path, offset: int, *, skip_damaged: bool = False) -> tuple[list[dict[str, Any]], int]:
    """The whole lines from `offset` on, and the offset to go on from.

    A file that became shorter is read from its start. Raises DamagedLine, unless damaged lines are to be skipped.
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
    return list(_records(whole, path, skip_damaged)), offset + len(whole) + 1


def _records(whole: bytes, path: Path, skip_damaged: bool) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if line.strip():
            try:
                yield _record(line, path, number)
            except DamagedLine:
                if not skip_damaged:
                    raise


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise DamagedLine(f"{path} is damaged: line {number} is no JSON object; take it out, then go on",
                          setting="run.run_dir")
    return record


def truncate_after_step(path: Path, step: int) -> int:
    """Cut the file from the first line whose `step` is greater than `step` on; the number of lines that went.

    In place, so that a writer that has the file open goes on after the cut. An absent file loses nothing. Raises
    DamagedLine, and then nothing has changed.
    """
    if not path.exists():
        return 0
    with open(path, "r+b") as file:
        _cut_torn_tail(file.fileno())
        kept_bytes, dropped = 0, 0
        for number, line in enumerate(file, start=1):
            if dropped or (line.strip() and _record(line, path, number).get("step", -math.inf) > step):
                dropped += 1
            else:
                kept_bytes += len(line)
        file.truncate(kept_bytes)
    return dropped


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
