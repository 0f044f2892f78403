"""What the report says of evaluations: a curve, a row a task, a mark a trial, and a video for those that have one."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from cosmos_actor.cli.evaluations import MOST_FILMS, evaluations_section, player


def trial(number: int, success: int = 1, *, step: int = 8, task: str = "reach", **more: Any) -> dict[str, Any]:
    return {"phase": "eval", "step": step, "unit": f"{task}/{number}", "task": task, "seed": 7, "initial_state": -1,
            "attempt": 0, "outcome": "done", "return": 1.5, "length": 4 + number, "success": success,
            "actor": "simulator-0", **more}


def filmed(number: int, success: int = 1, **more: Any) -> dict[str, Any]:
    one = trial(number, success, **more)
    return {**one, "video": f"videos/step_{one['step']:06d}/{one['task']}-trial-{number:03d}.mp4"}


def marks(page: str) -> list[tuple[str, str]]:
    """(title, sign) of each trial."""
    return re.findall(r'title="(trial [^"]*)">([●○×·])<', page)


class Page(HTMLParser):
    """Tags that have their ends, and what is in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag not in ("line", "circle", "rect", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_without_an_evaluation_there_is_nothing() -> None:
    training = {"task": "reach", "return": 1.0, "length": 3, "success": 1, "step": 1}
    assert evaluations_section([training]) == "" and player([training]) == ""


def test_each_trial_of_the_last_evaluation_has_its_mark() -> None:
    page = evaluations_section([
        trial(0, 1, step=4), trial(0, 0), filmed(1, 1), trial(2, -1), trial(3, -1, outcome="error")])
    assert marks(page) == [("trial 0: failure", "○"), ("trial 1: success, filmed", "●"), ("trial 2: ended", "·"),
                           ("trial 3: error of a simulator", "×")]
    assert "1/2 = 50 %" in page  # an error and an unknown one are no word about the policy
    assert "All tasks: 1 of 2 trials succeeded, 50 % (9–91 %)." in page
    assert 'aria-label="lengths of 3 episodes, 4 to 6 steps"' in page
    Page(page)


@pytest.mark.parametrize(("steps", "curves"), [([4], 0), ([4, 8], 1)])
def test_a_curve_needs_two_evaluations(steps: list[int], curves: int) -> None:
    page = evaluations_section([trial(0, step % 8 == 0, step=step) for step in steps])
    assert page.count("Success by step") == curves
    if curves:
        assert "all tasks: 0 at 4, 1 at 8" in page


def test_several_tasks_have_a_curve_each_while_there_are_colours() -> None:
    def page(tasks: int) -> str:
        return evaluations_section([trial(0, task=f"t{at}", step=step) for at in range(tasks) for step in (1, 2)])

    assert page(3).count("<polyline") == 4
    assert page(9).count("<polyline") == 1


def test_the_player_shows_what_was_filmed_newest_first_and_says_what_it_is() -> None:
    page = player([filmed(0, step=4), filmed(0, 0, instruction="<reach> it"), trial(1), filmed(2, initial_state=3)])
    read = Page(page)
    assert [video["src"] for video in read.all("video")] == [
        "videos/step_000008/reach-trial-000.mp4", "videos/step_000008/reach-trial-002.mp4",
        "videos/step_000004/reach-trial-000.mp4"]
    assert [video["preload"] for video in read.all("video")] == ["metadata", "none", "none"]
    assert all("controls" in video for video in read.all("video"))
    assert ["open" in details for details in read.all("details")] == [True, False, False]
    for fact in ("&lt;reach&gt; it", "1.5", "4 steps", "seed 7", "initial state 3", "simulator-0", "failure"):
        assert f">{fact}</dd>" in page
    assert "<script" not in page and "http" not in page


def test_a_mark_leads_to_its_video() -> None:
    episodes = [filmed(0, task="a b/ü"), filmed(1, task="a b/ü")]
    links = [link["href"] for link in Page(evaluations_section(episodes)).all("a")]
    assert links == [f"#{details['id']}" for details in Page(player(episodes)).all("details")]
    assert len(set(links)) == 2


def test_a_page_of_thousands_is_not_made() -> None:
    page = player([filmed(number) for number in range(MOST_FILMS + 1)])
    assert page.count("<video") == MOST_FILMS
    assert f"The newest {MOST_FILMS} of {MOST_FILMS + 1}" in page
