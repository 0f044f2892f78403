"""The page of promises names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contract" / "README.md"


def test_every_promise_names_tests_that_exist() -> None:
    if not PAGE.exists():
        pytest.skip("the docs are not beside these tests")
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        file = ""
        named = re.findall(r"`([\w/]+\.py)?(?:::(\w+))?`", row.split("|")[3])
        assert any(name for name, _ in named), row
        for name, test in named:
            file = name or file
            path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "bus" / file
            assert path.exists(), file
            assert not test or f"def {test}(" in path.read_text(), f"{file}::{test}"
