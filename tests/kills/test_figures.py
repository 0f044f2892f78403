"""Each promise of the figures can break: a run directory that is well, then one thing wrong at a time."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.actors.json_lines import JsonLinesWriter
from cosmos_actor.actors.ledger import Ledger
from tests.job.runs import Run
from tests.kills.figures import SFT_STEPS, TRAJECTORIES, broken, figures
from tests.kills.killer import Death
from tests.kills.plan import steps_of

ACTORS = ("controller-0", "policy-0", "rollout-0")
KILLS = len(ACTORS)
FIRST, LAST = SFT_STEPS + 1, SFT_STEPS + steps_of(KILLS)
DEATHS = [Death(actor, f"1-{actor}", 100.0 + number, 1, True) for number, actor in enumerate(ACTORS)]


def append(path: Path, *records: dict[str, Any]) -> None:
    writer = JsonLinesWriter(path)
    for record in records:
        writer.append(record)
    writer.close()


def life(actor: str, number: int) -> dict[str, Any]:
    return {"event": "started", "actor": actor, "role": actor[:-2], "incarnation": f"{number}-{actor}", "pid": 1}


def end(death: Death, **changes: Any) -> dict[str, Any]:
    return {"event": "exited", "actor": death.actor, "incarnation": death.incarnation, "time": death.time + 0.02,
            "outcome": "abnormal", "reason": "killed by SIGKILL", **changes}


@pytest.fixture
def run(tmp_path) -> Run:
    """The directory of a run as it should be after the kills."""
    run = Run(tmp_path, popen=None)
    run.directory.mkdir()
    append(run.directory / "events.jsonl", *(life(actor, number) for number in (1, 2) for actor in ACTORS),
           *(end(death) for death in DEATHS), {"event": "rewind", "reason": "policy-0 is gone"})
    append(run.directory / "metrics.jsonl", *({"step": step, "loss/total": 1.0} for step in range(1, LAST + 1)))
    with Ledger(run.directory / "ledger.sqlite") as ledger:
        for step in range(FIRST, LAST + 1):
            keys = [(f"g{step}/{sample}", 0) for sample in range(TRAJECTORIES)]
            ledger.dispatched(keys, step, step)
            ledger.generated(keys, step, step)
            ledger.trained(keys, step)
    return run


def change(run: Run, statement: str) -> None:
    with closing(sqlite3.connect(run.directory / "ledger.sqlite")) as database, database:
        assert database.execute(statement).rowcount == 1 or statement.startswith("DROP")


def test_a_run_that_is_well_breaks_nothing(run):
    found = figures(run, DEATHS)
    assert broken(found) == []
    assert found["actors"] == {actor: {"killed": 1, "came_back": 1} for actor in ACTORS}
    assert (found["rewinds"], found["restarts_of_the_controller"], found["steps"]) == (1, 1, LAST)
    assert found["found_ms"] == {"median": 20.0, "max": 20.0}


@pytest.mark.parametrize("event, promise", [
    (end(DEATHS[0], incarnation="2-policy-0", reason="exit 1: KeyError"), "nobody dies but who is killed"),
    (life("rollout-0", 3), "each of the killed comes back"),
    (end(DEATHS[0], reason="out of memory"), "each kill is reported as one"),
])
def test_events_that_break_a_promise(run, event, promise):
    append(run.directory / "events.jsonl", event)
    assert broken(figures(run, DEATHS)) == [promise]


def test_a_kill_that_nobody_reports(run):
    unheard = Death("rollout-0", "2-rollout-0", 110.0, 5, True)
    assert "each kill is reported as one" in broken(figures(run, [*DEATHS, unheard]))


def test_kills_that_are_known_late(run):
    late = [Death(death.actor, death.incarnation, death.time - 1, death.step, death.served) for death in DEATHS]
    assert broken(figures(run, late)) == ["half of the kills are known in time"]
    assert broken(figures(run, late), found_s=2.0) == []


@pytest.mark.parametrize("step", [LAST, LAST + 1])
def test_a_step_that_is_twice_or_too_far(run, step):
    append(run.directory / "metrics.jsonl", {"step": step, "loss/total": 1.0})
    found = figures(run, DEATHS)
    assert found["steps_wrong"] == [step] and broken(found) == ["each step is done, once"]


@pytest.mark.parametrize("statement, promise", [
    (f"DELETE FROM trajectories WHERE id = 'g{FIRST}/0'",
     ["the ledger balances", "each step trains all of its samples"]),
    (f"UPDATE trajectories SET status = 'buffered' WHERE id = 'g{FIRST}/0'",
     ["the ledger balances", "each step trains all of its samples"]),
    (f"UPDATE trajectories SET trained_step = {LAST} WHERE id = 'g{FIRST}/0'", ["each step trains all of its samples"]),
])
def test_rows_that_break_a_promise(run, statement, promise):
    change(run, statement)
    assert broken(figures(run, DEATHS)) == promise


def test_a_trajectory_in_two_trained_rows(run):
    change(run, "DROP INDEX one_living_attempt")
    change(run, f"UPDATE trajectories SET id = 'g{FIRST}/1', attempt = 1 WHERE id = 'g{FIRST}/0'")
    found = figures(run, DEATHS)
    assert found["trained_twice"] == 1 and broken(found) == ["nothing is trained twice"]


@pytest.mark.parametrize("more, promise", [
    ({"exit_code": 1}, "the run ends well"),
    ({"left": ["process 7"]}, "nothing is left"),
    ({"same_losses": False}, "the losses are those of an undisturbed run"),
])
def test_what_is_seen_after_the_end(run, more, promise):
    assert broken({**figures(run, DEATHS), **more}) == [promise]
