"""What the bus warns of goes into a file and, once and in words, onto the display; never raw onto stderr."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cosmos_actor.cli.up_log import SHOWN_AT_MOST, warnings_into

BUS = logging.getLogger("cosmos_actor.bus.bus")


def test_a_warning_is_written_whole_and_shown_once_in_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    notices: list[str] = []
    with warnings_into(tmp_path / "up.log", notices.append):
        for life in ("3f2a9c0d1e4b5a6978", "1-79c356c6d40b49a4bafb659d4b40d388"):
            BUS.warning("%s: refused %s: %s", "registry-0/" + "a" * 32, f"rollout-far/{life}", "other run: tcp://h/1")
    assert notices == ["refused rollout-far: other run: tcp://h/1"]
    assert [line.split(" ", 2)[2] for line in (tmp_path / "up.log").read_text().splitlines()] == [
        f"registry-0/{'a' * 32}: refused rollout-far/{life}: other run: tcp://h/1"
        for life in ("3f2a9c0d1e4b5a6978", "1-79c356c6d40b49a4bafb659d4b40d388")]
    assert capfd.readouterr() == ("", "")


def test_a_stranger_that_knocks_for_ever_does_not_scroll_the_run_away(tmp_path: Path) -> None:
    notices: list[str] = []
    with warnings_into(tmp_path / "up.log", notices.append):
        for number in range(3 * SHOWN_AT_MOST):
            BUS.warning("registry-0/1: refused stranger %d", number)
    assert len(notices) == SHOWN_AT_MOST + 1 and notices[-1].endswith("up.log")
    assert len((tmp_path / "up.log").read_text().splitlines()) == 3 * SHOWN_AT_MOST


def test_a_file_that_can_not_be_written_changes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    notices: list[str] = []
    with warnings_into(tmp_path / "no" / "up.log", notices.append):
        BUS.warning("registry-0/1: refused stranger")
    assert (notices, capfd.readouterr().err) == (["refused stranger"], "")


def test_afterwards_everything_is_as_before(tmp_path: Path) -> None:
    logger = logging.getLogger("cosmos_actor")
    before = (list(logger.handlers), logger.propagate)
    with warnings_into(tmp_path / "up.log", lambda text: None):
        pass
    assert (logger.handlers, logger.propagate) == before
