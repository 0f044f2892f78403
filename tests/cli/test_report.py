"""The report is one self-contained page, whatever became of the run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import cosmos_actor
from cosmos_actor.cli.progress import FIGURES
from cosmos_actor.cli.report import CHARTS, ReportInput, report_page, write_report
from cosmos_actor.cli.run_view import RunView
from tests.cli.sample_run import make_run

VOID = {"meta", "br", "rect", "circle", "line", "polyline", "path"}


class Checker(HTMLParser):
    """Collects what a page loads, and fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def check(page: str) -> None:
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and checker.loads == []
    assert "<script" not in page and "url(" not in page and "@import" not in page and "http" not in page


def test_a_finished_run_shows_everything(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "run"), outcome="all 120 steps are done", ok=True)
    page = path.read_text(encoding="utf-8")
    check(page)
    for words in ("all 120 steps are done", ">finished<", "start → end", "0.55 → 0.97", "Loss of the SFT phase",
                  "KL to the ref", "Entropy", "Staleness", "Throughput", "Time of a step", "rollout had nothing to do",
                  "killed by SIGKILL", "Every trajectory that was dispatched is accounted for", "dropped: stale",
                  "config.resolved.toml", "learning_rate", "prefers-color-scheme"):
        assert words in page, words
    assert len(re.findall(r'<svg viewBox="0 0 560 240" role="img" aria-label=', page)) == 11


def test_a_run_that_failed_before_its_first_step_has_a_report_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", metrics=[])
    (run / "ledger.sqlite").unlink()
    page = write_report(run, outcome="policy-0 failed to start: exit 1", ok=False).read_text(encoding="utf-8")
    check(page)
    for words in (">failed<", "policy-0 failed to start: exit 1", "No step was finished", "There is no ledger"):
        assert words in page


def test_a_run_without_any_file_has_a_report(tmp_path: Path) -> None:
    page = write_report(tmp_path).read_text(encoding="utf-8")
    check(page)
    assert "The settings could not be read." in page and "not over" in page


def test_a_video_that_is_kept_no_longer_is_not_offered(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    names = [f"videos/step_{step:06d}/reach-trial-000-success.mp4" for step in (1, 2)]
    (run / names[1]).parent.mkdir(parents=True)
    (run / names[1]).write_bytes(b"")
    (run / "episodes.jsonl").write_text("".join(json.dumps({
        "phase": "eval", "step": step, "unit": "reach/0", "task": "reach", "seed": 1, "attempt": 0, "initial_state": -1,
        "success": 1, "outcome": "done", "return": 1.0, "length": 3, "actor": "simulator-0", "video": name}) + "\n"
        for step, name in enumerate(names, 1)))
    page = write_report(run).read_text(encoding="utf-8")
    assert f'src="{names[1]}"' in page and names[0] not in page


def test_what_others_wrote_can_not_become_markup() -> None:
    evil = "<script>alert(1)</script>"
    view = RunView()
    view.add_events([{"event": "started", "actor": evil, "interpreter": evil, "pid": 1},
                     {"event": "exited", "actor": evil, "reason": evil}])
    page = report_page(ReportInput(
        name=evil, view=view, outcome=evil, ok=False, settings={"run.name": evil}, digest="d",
        balance={"dispatched": 1, "trained": 0, "dropped": {evil: 1}, "buffered": 0, "in_flight": 0, "balanced": True}))
    check(page)


def test_every_metric_that_is_shown_is_one_that_is_written() -> None:
    """A renamed metric would take its curve away without a word."""
    root = Path(cosmos_actor.__file__).parent
    written = "".join(path.read_text() for part in ("job", "roles", "trainer") for path in (root / part).glob("*.py"))
    shown = {name for chart in CHARTS for name, _ in chart.metrics} | {name for _, name, _ in FIGURES}
    assert {name for name in shown if f'"{name}"' not in written} == set()


@pytest.mark.parametrize("balanced", [True, False])
def test_a_ledger_that_does_not_balance_is_said(balanced: bool) -> None:
    balance = {"dispatched": 3, "trained": 2, "dropped": {}, "buffered": 0, "in_flight": 0, "balanced": balanced}
    page = report_page(ReportInput(name="x", view=RunView(), balance=balance))
    assert ("does NOT balance" in page) is not balanced
