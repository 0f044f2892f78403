"""What became of a run whose actors were killed: figures from its directory, and the promises that they break."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from tests.job.runs import Run
from tests.kills.killer import Death
from tests.kills.plan import steps_of

SFT_STEPS, TRAJECTORIES = 4, 8 * 4
"""Of the recipe in `tests.job.runs`: supervised steps, and what one further step trains."""
FOUND_S = 0.1
"""Within what the supervisor knows of half of the kills. Not of all: on a machine that is loaded some come late."""
KILLED = "killed by SIGKILL"


def figures(run: Run, deaths: Sequence[Death]) -> dict[str, Any]:
    """All that the run directory tells; plain objects."""
    started, exited, restarting = run.events("started"), run.events("exited"), run.events("restarting")
    ends = {event["incarnation"]: event for event in exited}
    killed = {death.incarnation for death in deaths}
    found = [1000 * (ends[death.incarnation]["time"] - death.time) for death in deaths if death.incarnation in ends]
    first_controllers = [event["incarnation"] for event in started if event["role"] == "controller"][:1]
    return {
        "kills": len(deaths),
        "kills_while_starting": sum(not death.served for death in deaths),
        "actors": _by_actor(deaths, started),
        "found": len(found),
        "found_ms": {"median": round(median(found), 1), "max": round(max(found), 1)} if found else {},
        "other_ends": [f"{event['actor']}: {event['reason']}" for event in exited
                       if event["outcome"] == "abnormal" and event["incarnation"] not in killed],
        "other_reasons": [f"{event['actor']}: {event['reason']}" for event in exited
                          if event["incarnation"] in killed and event["reason"] != KILLED],
        "restarts": len(restarting),
        "rewinds": len(run.events("rewind")),
        "restarts_of_the_controller": sum(event["role"] == "controller" and
                                          event["incarnation"] not in first_controllers for event in started),
        "steps": sum("loss/total" in line for line in run.metrics()),
        "steps_wrong": _steps_wrong(run, SFT_STEPS + steps_of(len(deaths))),
        "balance": run.balance(),
        **_trained(run.directory / "ledger.sqlite", SFT_STEPS + 1, SFT_STEPS + steps_of(len(deaths))),
    }


def broken(figures: dict[str, Any], *, found_s: float = FOUND_S) -> list[str]:
    """The promises that were not kept, one line each; `found_s` is more than promised where a machine may be loaded."""
    balance, kills = figures["balance"], figures["kills"]
    promises = {
        "each kill is reported as one": figures["found"] == kills and not figures["other_reasons"],
        "each of the killed comes back": all(actor["killed"] == actor["came_back"]
                                             for actor in figures["actors"].values()),
        "nobody dies but who is killed": not figures["other_ends"],
        "half of the kills are known in time": figures["found_ms"].get("median", 1e9) < 1000 * found_s,
        "each step is done, once": not figures["steps_wrong"],
        "the ledger balances": balance["balanced"] and not balance["in_flight"] and not balance["buffered"],
        "nothing is trained twice": not figures["trained_twice"],
        "each step trains all of its samples": not figures["steps_trained_wrong"],
        "the losses are those of an undisturbed run": figures.get("same_losses", True),
        "nothing is left": not figures.get("left", []),
        "the run ends well": figures.get("exit_code", 0) == 0,
    }
    return [promise for promise, kept in promises.items() if not kept]


def _by_actor(deaths: Sequence[Death], started: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    killed, lives = Counter(death.actor for death in deaths), Counter(event["actor"] for event in started)
    return {actor: {"killed": killed[actor], "came_back": lives[actor] - 1} for actor in sorted(lives)}


def _steps_wrong(run: Run, last: int) -> list[int]:
    """Steps of 1 to `last` that metrics.jsonl has not exactly once, and others that it has."""
    lines = Counter(line["step"] for line in run.metrics() if "loss/total" in line)
    return sorted(step for step in lines.keys() | set(range(1, last + 1)) if lines[step] != 1 or not 1 <= step <= last)


def _trained(ledger: Path, first: int, last: int) -> dict[str, Any]:
    """From the rows themselves: ids in two trained rows, and steps that did not train what a step trains."""
    with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True)) as database:
        twice = database.execute("SELECT COUNT(*) FROM (SELECT id FROM trajectories WHERE status = 'trained'"
                                 " GROUP BY id HAVING COUNT(*) > 1)").fetchone()[0]
        by_step = dict(database.execute("SELECT trained_step, COUNT(*) FROM trajectories WHERE status = 'trained'"
                                        " GROUP BY trained_step"))
    expected = dict.fromkeys(range(first, last + 1), TRAJECTORIES)
    return {"trained_twice": twice, "steps_trained_wrong": sorted(
        step for step in by_step.keys() | expected.keys() if by_step.get(step) != expected.get(step))}
