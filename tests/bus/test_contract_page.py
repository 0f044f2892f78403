"""The pages of promises name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "contract"
LETTERS = {"work": "W", "call": "C", "event": "E", "state": "S", "peers": "P", "bytes": "B", "ends": "Z",
           "registry": "R", "faults": "F", "simulators": "M", "fan-out": "G"}
FOLDERS = {"fan-out": "weight_plane"}
"""Of the tests that a page names without one; otherwise tests/bus."""


@pytest.mark.skipif(not PAGES.exists(), reason="the docs are not beside these tests")
@pytest.mark.parametrize("page", sorted(LETTERS))
def test_every_promise_is_numbered_and_names_tests_that_exist(page: str) -> None:
    lines = (PAGES / f"{page}.md").read_text().splitlines()
    rows = [line for line in lines if re.match(r"\| [A-Z]\d+ \|", line)]
    assert [row.split("|")[1].strip() for row in rows] == [f"{LETTERS[page]}{n + 1}" for n in range(len(rows))] and rows
    for row in rows:
        file = ""
        named = re.findall(r"`([\w/]+\.py)?(?:::(\w+))?`", row.rsplit("|", 2)[1])
        assert any(name for name, _ in named), row
        for name, test in named:
            file = name or file
            path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / FOLDERS.get(page, "bus") / file
            assert path.exists(), file
            assert not test or f"def {test}(" in path.read_text(), f"{file}::{test}"


def test_the_index_names_every_page() -> None:
    if not PAGES.exists():
        pytest.skip("the docs are not beside these tests")
    index = (PAGES / "README.md").read_text()
    assert {path.stem for path in PAGES.glob("*.md")} == {*LETTERS, "README"}
    assert all(f"({page}.md)" in index for page in LETTERS)
    pages = "".join((PAGES / f"{page}.md").read_text() for page in LETTERS)
    assert len(re.findall(r"^\| [A-Z]\d+ \|", pages, re.MULTILINE)) > 30
