"""A real job in which one chunk takes long, under each choice of the limiter: all steps, all accounted for."""

from __future__ import annotations

import pytest

from tests.job.runs import Run
from tests.project.source import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SLOW = ('data.task="tests.job.mortal_task:slow"', "reward.count=2", "limiter.straggler_s=4")
ALL, CHUNK = 6 * 8 * 4, 4 * 4


@pytest.fixture(autouse=True)
def slow(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SLOW_MARK", str(tmp_path / "judged-before"))
    monkeypatch.setenv("SLOW_S", "15")


def finished(run: Run, *sets: str) -> dict[str, int]:
    """Run it to its end; what the limiter counted. One chunk is slow, and on a busy machine others may be so too."""
    run.finish(sets=[*SLOW, *sets])
    lines = [line for line in run.metrics() if "loss/total" in line]
    assert [line["step"] for line in lines] == list(range(1, 11))
    balance = run.balance()
    assert balance["balanced"] and balance["in_flight"] == balance["buffered"] == 0
    assert balance["dispatched"] == balance["trained"] + sum(balance["dropped"].values())
    assert max(line.get("staleness/max", 0) for line in lines) <= 1
    return {name.partition("/")[2]: count for name, count in lines[-1].items() if name.startswith("limiter/")}


def test_asked_again_of_another_the_losses_are_those_of_a_run_without_a_straggler(run, uninterrupted):
    counted = finished(run, "limiter.straggler=redispatch")
    assert counted["redispatched"] >= 4 and "short_steps" not in counted
    assert run.losses() == uninterrupted.losses()
    assert run.balance()["trained"] == ALL and run.balance()["dropped"] == {}


def test_dropped_it_is_replaced_by_another_prompt(run):
    counted = finished(run, "limiter.straggler=drop")
    assert counted["gone/straggler"] >= 4 and counted["replaced"] == counted["gone/straggler"]
    assert run.balance()["trained"] == ALL and run.balance()["dropped"]["straggler"] >= CHUNK


@pytest.mark.parametrize("at_bound", ["pace", "wait"])
def test_a_step_goes_on_without_it_and_a_later_one_trains_it(run, at_bound):
    counted = finished(run, "limiter.straggler=short", f"limiter.at_bound={at_bound}", "run.max_staleness=1",
                       "limiter.ahead=0")
    assert counted["short_steps"] >= 1 and counted["left_behind"] >= 4
    assert set(run.balance()["dropped"]) <= {"left over when the run ended", "stale: more than 1 versions old"}
    assert {line.get("staleness/max") for line in run.metrics()} >= {0, 1}, "the late groups were trained"


def test_or_it_is_dropped_when_it_comes_too_late(run):
    counted = finished(run, "limiter.straggler=short", "limiter.at_bound=drop")
    assert counted["short_steps"] >= 1 and counted["left_behind"] >= 4
    dropped = run.balance()["dropped"]
    assert set(dropped) <= {"left over when the run ended", "stale: more than 0 versions old"}
    assert sum(dropped.values()) >= CHUNK


def test_more_is_asked_for_than_a_step_needs_and_the_first_are_taken(run):
    finished(run, "limiter.samples_per_insert=0.5")
    balance = run.balance()
    assert balance["trained"] == ALL and balance["dispatched"] == 2 * ALL == balance["trained"] + sum(
        balance["dropped"].values())
