from __future__ import annotations

import pytest

from cosmos_actor.actors.restart_policy import Outcome, Restart, RestartLimits, RestartWindow, Strategy


@pytest.mark.parametrize("restart, normal, shutdown, abnormal", [
    (Restart.PERMANENT, True, True, True),
    (Restart.TRANSIENT, False, False, True),
    (Restart.TEMPORARY, False, False, False),
])
def test_who_is_started_again_after_which_end(restart: Restart, normal: bool, shutdown: bool, abnormal: bool) -> None:
    assert restart.after(Outcome.NORMAL) is normal
    assert restart.after(Outcome.SHUTDOWN) is shutdown
    assert restart.after(Outcome.ABNORMAL) is abnormal


@pytest.mark.parametrize("strategy, failed, group", [
    (Strategy.ONE_FOR_ONE, "b", ["b"]),
    (Strategy.ONE_FOR_ALL, "b", ["a", "b", "c"]),
    (Strategy.REST_FOR_ONE, "b", ["b", "c"]),
    (Strategy.REST_FOR_ONE, "a", ["a", "b", "c"]),
    (Strategy.REST_FOR_ONE, "c", ["c"]),
])
def test_who_shares_a_fate(strategy: Strategy, failed: str, group: list[str]) -> None:
    assert strategy.group(["a", "b", "c"], failed) == group


def test_the_window_counts_restarts_of_the_last_period_both_edges_included() -> None:
    window = RestartWindow(10.0)
    assert [window.add(now) for now in (0.0, 5.0, 10.0)] == [1, 2, 3]
    assert window.add(10.5) == 3, "the restart at 0 is older than the period"
    assert window.add(100.0) == 1


def test_the_first_restart_is_at_once_and_later_ones_wait_twice_as_long_each_up_to_the_most() -> None:
    limits = RestartLimits(back_off_first_s=0.5, back_off_most_s=3.0)
    assert [limits.back_off_s(restarts) for restarts in range(1, 7)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert limits.back_off_s(10_000) == 3.0


@pytest.mark.parametrize("wrong", [{"intensity": -1}, {"period_s": 0.0}, {"stop_s": 0.0}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="needed"):
        RestartLimits(**wrong)  # type: ignore[arg-type]
