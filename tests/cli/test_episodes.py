"""Episodes, task by task: the interval, and that an error of a simulator is no result."""

from __future__ import annotations

import pytest

from cosmos_actor.cli.episodes import episodes_section, wilson


@pytest.mark.parametrize(("k", "n", "low", "high"), [
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)])
def test_the_interval_is_the_published_one(k: int, n: int, low: float, high: float) -> None:
    assert wilson(k, n) == pytest.approx((low, high), abs=5e-5)


def test_nothing_tried_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


def episode(task: str, total: float, success: int = -1, attempt: int = 0) -> dict[str, object]:
    return {"task": task, "return": total, "length": 10, "success": success, "attempt": attempt}


def test_each_task_has_its_row_and_errors_are_told_apart() -> None:
    ended = [*(episode("reach", 1.0, at % 2) for at in range(20)), *(episode("<push>", 5.0) for _ in range(30)),
             episode("<push>", 5.0, attempt=2)]
    page = episodes_section(ended, [{"kind": "hang"}, {"kind": "step"}, {"kind": "hang"}])
    assert "<td>reach</td><td>20</td><td>1</td><td>1/2 = 50 % (9–91 %)</td>" in page
    assert "<td>&lt;push&gt;</td><td>31</td><td>5</td><td>–</td><td>10</td><td>10</td><td>1</td>" in page
    assert "Errors of simulators, none of which is a result: 2 × hang, 1 × step." in page


def test_an_evaluation_is_a_row_of_its_own_and_an_error_is_no_failure() -> None:
    tried = {"phase": "eval", "step": 7}
    page = episodes_section([*({**episode("reach", 2.0, 1), **tried, "outcome": "done"} for _ in range(3)),
                             {**episode("reach", 0.0, 0), **tried, "outcome": "done"},
                             {**episode("reach", 0.0), **tried, "outcome": "error"}, episode("reach", 1.0)], [])
    assert "<td>reach, evaluated after step 7</td><td>4</td><td>1.5</td><td>3/4 = 75 % (30–95 %)</td>" in page
    assert "<td>reach</td><td>1</td><td>1</td><td>–</td>" in page
