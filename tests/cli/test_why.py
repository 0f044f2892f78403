"""`cosmos-actor why` over run directories as a head leaves them; over real jobs in tests/job/test_sentinel.py."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.actors.run_directory import RunDirectory
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.recipes.resolved import resolved_text
from cosmos_actor.recipes.settings import digest
from tests.cli.conftest import Cli
from tests.cli.sample_run import make_run

CONTROLLER = {
    "actor": "controller-0", "role": "controller", "incarnation": "1-c", "host": "elsewhere", "pid": 1,
    "state": "ready", "silent_s": 0.3, "statistics": {
        "waits": [{"what": "policy update 12", "on": "", "for_s": 41.0}],
        "questions": [{"what": "policy update 12", "role": "policy", "at": "policy-0", "count": 1, "for_s": 41.0}]}}
POLICY = {"actor": "policy-0", "role": "policy", "incarnation": "1-p", "host": "elsewhere", "pid": 2, "state": "ready",
          "silent_s": 40.2, "statistics": {"computing": {"what": "update", "for_s": 1.0, "still_s": 1.0,
                                                         "blocked_s": 0.0}}}


@pytest.fixture
def live(here: Path) -> Iterator[Path]:
    """A run that this process holds, as `up` does."""
    settings = resolve("grpo-arithmetic")
    with RunDirectory.create(here / "run", digest(settings), run_id="sample", resolved=resolved_text(settings)) as run:
        yield run.root


def write_status(root: Path, *members: dict[str, Any], age_s: float = 0.5,
                 supervisor_silent_s: float | None = 0.5) -> None:
    (root / "status.json").write_text(json.dumps({
        "time": time.time() - age_s, "pid": os.getpid(), "supervisor_silent_s": supervisor_silent_s,
        "head": "tcp://127.0.0.1:1", "members": members, "children": [], "stuck_s": 2.5,
        "stuck": {"policy-0": {"kind": "silent", "reason": "no heartbeat for 2.6 s"}}, "still_s": 40.0}))


def test_the_screen_has_the_cause_first_and_then_who_waits(cli: Cli, live: Path) -> None:
    write_status(live, CONTROLLER, POLICY)
    answer = cli("why", "run")
    assert answer.code == 0
    assert answer.out.splitlines() == [
        f"{live}: step 0, nothing got done for 40 s",
        "likely cause",
        "  policy-0 gave no heartbeat for 40 s, last seen at update - waited for by controller-0",
        "who waits",
        "  controller-0 waits 41 s for policy update 12: at policy-0 for 41 s, which gave no heartbeat for 40 s, last "
        "seen at update"]


def test_the_same_as_data(cli: Cli, live: Path) -> None:
    write_status(live, CONTROLLER, POLICY)
    answer = json.loads(cli("why", "run", "--json").out)
    assert answer["causes"] == ["policy-0"] and answer["cycles"] == []
    assert [(wait["by"], wait["on"], wait["for_s"]) for wait in answer["waits"]] == [
        ("controller-0", ["policy-0"], 41.0)]
    assert answer["nodes"]["policy-0"]["standing"] == "silent"
    assert answer["stuck"]["policy-0"]["kind"] == "silent" and answer["still_s"] == 40.0


def test_a_registry_that_says_nothing_is_said_first(cli: Cli, live: Path) -> None:
    write_status(live, CONTROLLER, POLICY, age_s=12.0)
    lines = cli("why", "run").out.splitlines()
    assert lines[1].startswith(f"the registry, process {os.getpid()}, has said nothing for 12 s: it is ")
    assert lines[2] == "what follows is 12 s old"


def test_so_is_a_supervisor_that_says_nothing_to_it(cli: Cli, live: Path) -> None:
    write_status(live, CONTROLLER, POLICY, supervisor_silent_s=9.0)
    line = cli("why", "run").out.splitlines()[1]
    assert line.startswith(f"the supervisor, process {os.getpid()}, has said nothing to the registry for 9 s: it is ")
    write_status(live, CONTROLLER, POLICY, supervisor_silent_s=None)
    line = cli("why", "run").out.splitlines()[1]
    assert line.startswith(f"the supervisor, process {os.getpid()}, has no link to the registry: it is ")


def test_a_run_that_has_written_nothing_yet_is_one_line(cli: Cli, live: Path) -> None:
    assert "has written no status.json" in cli("why", "run").out


def test_a_run_that_is_over_says_how_it_ended(cli: Cli, here: Path) -> None:
    make_run(here / "run", metrics=[])
    with (here / "run" / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "ended", "kind": "gave_up", "reason": "gave up: 11 restarts"}) + "\n")
    assert cli("why", "run").out == f"{here / 'run'} is not running: gave up: 11 restarts\n"


def test_a_run_that_is_not_there_is_one_line(cli: Cli, here: Path) -> None:
    assert "there is no run `nowhere`" in cli("why", "nowhere").error
