from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cosmos_actor.actors.json_lines import (
    DamagedLine,
    ForgivingWriter,
    JsonLinesWriter,
    follow_json_lines,
    read_json_lines,
    truncate_after_step,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, *records: dict) -> None:
    writer = JsonLinesWriter(path)
    for record in records:
        writer.append(record)
    writer.close()


def test_lines_are_there_when_append_returned(path: Path) -> None:
    writer = JsonLinesWriter(path)
    writer.append({"step": 1})
    assert read_json_lines(path) == [{"step": 1}]
    writer.append({"step": 2, "text": "ä\nb"})
    assert read_json_lines(path) == [{"step": 1}, {"step": 2, "text": "ä\nb"}]
    assert writer.statistics() == {"lines_appended": 2, "repaired_bytes": 0}
    writer.close()


def test_numbers_are_strict_json(path: Path) -> None:
    write(path, {"loss": math.nan, "max": [math.inf], "reward": np.float32(0.5), "step": np.int64(3), "at": Path("/x")})
    assert json.loads(path.read_text()) == {"loss": None, "max": [None], "reward": 0.5, "step": 3, "at": "/x"}


def test_what_is_not_json_is_refused_and_leaves_the_file_whole(path: Path) -> None:
    writer = JsonLinesWriter(path)
    with pytest.raises(TypeError, match="object can not be written as JSON"):
        writer.append({"thing": object()})
    writer.close()
    assert path.read_text() == ""


@pytest.mark.parametrize("torn", ['{"st', '{"step": 2}', "x" * 200_000])
def test_a_torn_tail_is_skipped_by_readers_and_cut_by_the_next_writer(path: Path, torn: str) -> None:
    write(path, {"step": 1})
    with open(path, "a") as file:
        file.write(torn)
    assert read_json_lines(path) == [{"step": 1}]
    writer = JsonLinesWriter(path)
    assert writer.repaired_bytes == len(torn)
    writer.append({"step": 2})
    writer.close()
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]


def test_a_file_that_is_nothing_but_torn_becomes_empty(path: Path) -> None:
    path.write_text("{" * 100)
    JsonLinesWriter(path).close()
    assert path.read_text() == ""


def test_following_gives_each_line_once(path: Path) -> None:
    assert follow_json_lines(path, 0) == ([], 0)
    write(path, {"step": 1}, {"step": 2})
    records, offset = follow_json_lines(path, 0)
    assert [record["step"] for record in records] == [1, 2]
    with open(path, "a") as file:
        file.write('{"step": 3}')
        file.flush()
        assert follow_json_lines(path, offset) == ([], offset), "not whole yet"
        file.write("\n")
    records, offset = follow_json_lines(path, offset)
    assert records == [{"step": 3}] and offset == path.stat().st_size


def test_following_a_file_that_was_cut_starts_again(path: Path) -> None:
    write(path, *({"step": step} for step in range(9)))
    _, offset = follow_json_lines(path, 0)
    truncate_after_step(path, 1)
    assert [record["step"] for record in follow_json_lines(path, offset)[0]] == [0, 1]


def test_truncation_goes_from_the_first_later_step_on_and_keeps_lines_without_a_step(path: Path) -> None:
    write(path, {"phase": "sft"}, {"step": 1}, {"step": 2}, {"note": "x"}, {"step": 3}, {"note": "y"}, {"step": 4})
    assert truncate_after_step(path, 2) == 3
    assert read_json_lines(path) == [{"phase": "sft"}, {"step": 1}, {"step": 2}, {"note": "x"}]
    assert truncate_after_step(path, 2) == 0


def test_truncation_under_an_open_writer_and_of_a_torn_or_absent_file(path: Path) -> None:
    assert truncate_after_step(path, 3) == 0
    writer = JsonLinesWriter(path)
    for step in range(5):
        writer.append({"step": step})
    with open(path, "a") as file:
        file.write('{"step": 5')
    assert truncate_after_step(path, 1) == 3
    writer.append({"step": 2, "again": True})
    writer.close()
    assert read_json_lines(path) == [{"step": 0}, {"step": 1}, {"step": 2, "again": True}]


@contextmanager
def at_most(file_bytes: int) -> Iterator[None]:
    """As on a disk that is full after so many bytes of any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_finds_no_room_names_the_file_and_leaves_nothing_of_itself(path: Path) -> None:
    write(path, {"step": 1})
    writer = JsonLinesWriter(path)
    with at_most(path.stat().st_size + 5), pytest.raises(OSError, match=r"metrics\.jsonl"):
        writer.append({"step": 2})
    writer.append({"step": 3})
    writer.close()
    assert read_json_lines(path) == [{"step": 1}, {"step": 3}]


def test_a_line_that_may_be_lost_is_told_once_for_each_trouble(path: Path) -> None:
    told: list[str] = []
    inner = JsonLinesWriter(path)
    writer = ForgivingWriter(inner, told.append)
    for _ in range(2):
        with at_most(5):
            writer.append({"step": 2})
            writer.append({"step": 3})
        writer.append({"s": 4})
        path.write_bytes(b"")
    inner.close()
    assert (writer.lost, len(told)) == (4, 2) and "metrics.jsonl can not be written: File too large" in told[0]


@pytest.mark.parametrize("damage", [b"garbage", b"\xff\xfe\x00", b"7", b"[]", b'{"step": '])
def test_a_damaged_line_is_named_and_may_be_skipped(path: Path, damage: bytes) -> None:
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 2}\n')
    for read in (read_json_lines, lambda path: truncate_after_step(path, 5)):
        with pytest.raises(DamagedLine, match=r"metrics\.jsonl is damaged: line 2 is no JSON object"):
            read(path)
    assert [line["step"] for line in read_json_lines(path, skip_damaged=True)] == [1, 2]
