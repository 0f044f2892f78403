"""Finding runs and naming new ones; status and logs of a run, read from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cosmos_actor import death
from cosmos_actor.actors.errors import NotFound
from cosmos_actor.actors.run_directory import RunDirectory, RunPaths
from cosmos_actor.cli.run_state import is_alive, run_state
from cosmos_actor.cli.runs import claim_next, find_run, newest_of, point_latest
from cosmos_actor.cli.start import head_address, own_host_towards
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.recipes.resolved import resolved_text
from cosmos_actor.recipes.settings import digest
from tests.cli.conftest import Cli
from tests.cli.sample_run import append_line, make_run
from tests.waiting import eventually

RECIPE = resolve("grpo-arithmetic")
LAST_STEP = RECIPE.policy.sft_steps + RECIPE.run.steps


def test_runs_are_numbered_and_no_number_is_given_twice(here: Path) -> None:
    assert [claim_next("a").name for _ in range(3)] == ["a-1", "a-2", "a-3"]
    (here / "runs" / "a-9").mkdir()
    assert claim_next("a").name == "a-10"
    assert claim_next("a-b").name == "a-b-1"


def test_latest_points_at_a_run_wherever_it_is(here: Path) -> None:
    for name in ("first", "elsewhere/second"):
        make_run(here / name, metrics=[])
        point_latest(here / name)
        assert find_run("latest").root == here / name
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["latest"]


def test_a_run_is_found_by_path_and_by_name(here: Path) -> None:
    make_run(here / "runs" / "a-1", metrics=[])
    assert find_run("a-1").root == find_run("runs/a-1").root == here / "runs" / "a-1"
    with pytest.raises(NotFound, match="there is no run `a-2`; did you mean `a-1`?"):
        find_run("a-2")


def test_the_newest_of_a_recipe_is_the_one_with_the_highest_number(here: Path) -> None:
    for name in ("a-9", "a-10", "a-b-11"):
        make_run(here / "runs" / name, metrics=[])
    claim_next("a")  # empty: was never a run
    assert newest_of("a").root.name == "a-10"


def test_status_of_a_run_that_ended(cli: Cli, here: Path) -> None:
    make_run(here / "run")
    state = json.loads(cli("status", "run", "--json").out)
    assert (state["running"], state["step"], state["last_step"], state["processes"]) == (False, 120, LAST_STEP, 0)
    assert state["ledger"] == {"dispatched": 40, "trained": 30, "dropped": {"stale": 2}, "buffered": 4, "in_flight": 4,
                               "balanced": True}
    assert [actor["state"] for actor in state["actors"]] == ["lost"] * 7
    assert state["actors"][-1]["last_reason"] == "killed by SIGKILL"
    answer = cli("status", "run")
    assert answer.code == 0
    for words in ("not running", f"step 120/{LAST_STEP} grpo", "rollout-0", "40 dispatched = 30 trained + 4 buffered"):
        assert words in answer.out


def test_status_of_a_run_that_has_not_done_anything_yet(cli: Cli, here: Path) -> None:
    with RunDirectory.create(here / "run", "d", run_id="x", resolved=""):
        state = json.loads(cli("status", "run", "--json").out)
    assert (state["running"], state["supervisor_pid"]) == (True, os.getpid())
    assert (state["actors"], state["ledger"]) == ([], None)


def test_the_kernel_has_the_last_word_on_who_lives(here: Path) -> None:
    """A recorded pid that another process got later, or nobody, is not taken for the actor."""
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        now = time.time()
        assert is_alive(sleeper.pid, now)
        assert not is_alive(sleeper.pid, now - 3600)
        with RunDirectory.create(here / "run", "d", run_id="x", resolved="") as run:
            event = {"time": now, "event": "started", "actor": "rollout-0", "pid": sleeper.pid, "interpreter": "py"}
            append_line(run.events, event)
            run.root.joinpath("status.json").write_text(json.dumps({"head": "tcp://h:1", "members": [
                {"actor": "rollout-0", "state": "ready", "weights_held": "0.7", "busy_label": "generate"}]}))
            actor = run_state(run)["actors"][0]
            seen = (actor["alive"], actor["state"], actor["weights_held"], actor["doing"])
            assert seen == (True, "ready", "0.7", "generate")
            sleeper.kill()
            os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
            assert not is_alive(sleeper.pid, now)  # a zombie, not yet reaped
            sleeper.wait()
            assert run_state(run)["actors"][0]["state"] == "lost"
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_process_with_a_mark_is_known_by_it_whatever_the_clock_says() -> None:
    marked = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                              env={**os.environ, death.INCARNATION: "1-aa"})
    try:
        eventually(lambda: is_alive(marked.pid, 0.0, "1-aa"), "its environment in /proc", within_s=10.0)
        assert not is_alive(marked.pid, time.time(), "2-bb")
    finally:
        marked.kill()
        marked.wait()


def test_the_head_of_a_running_job_is_read_from_its_directory(here: Path) -> None:
    with RunDirectory.create(here / "run", "d", run_id="x", resolved="") as run:
        run.root.joinpath("status.json").write_text('{"head": "tcp://127.0.0.1:5"}')
        assert head_address("run") == "tcp://127.0.0.1:5"
    with pytest.raises(NotFound, match="is not running"):
        head_address("run")


def test_the_own_address_is_the_one_the_head_is_reached_from() -> None:
    assert own_host_towards("tcp://127.0.0.1:5555") == "127.0.0.1"


# ---- logs

@pytest.fixture
def logged(here: Path) -> RunPaths:
    """A run with two lives of rollout-0."""
    run = RunPaths(make_run(here / "runs" / "a-1", metrics=[]))
    for number, life in enumerate(("1-aa", "2-bb")):
        run.log("rollout-0", life).parent.mkdir(exist_ok=True)
        run.log("rollout-0", life).write_text(f"one of {life}\ntwo of {life}\n")
        os.utime(run.log("rollout-0", life), (number, number))
    point_latest(run.root)
    return run


def test_logs_prints_the_newest_life_unless_told(cli: Cli, logged: RunPaths) -> None:
    answer = cli("logs", "a-1", "rollout-0")
    assert answer.out == "one of 2-bb\ntwo of 2-bb\n" and "life 2 of 2" in answer.err
    assert cli("logs", "rollout-0", "--incarnation", "1-").out == "one of 1-aa\ntwo of 1-aa\n"


@pytest.mark.parametrize(("lines", "out"), [(1, "two of 2-bb\n"), (2, "one of 2-bb\ntwo of 2-bb\n"),
                                            (9, "one of 2-bb\ntwo of 2-bb\n")])
def test_logs_prints_the_last_lines(cli: Cli, logged: RunPaths, lines: int, out: str) -> None:
    assert cli("logs", "rollout-0", "-n", str(lines)).out == out


def test_logs_lists_the_actors_and_their_lives(cli: Cli, logged: RunPaths) -> None:
    assert cli("logs").out == "rollout-0  1-aa 2-bb\n"


def test_logs_of_an_unknown_actor_or_life_names_what_there_is(cli: Cli, logged: RunPaths) -> None:
    assert "did you mean rollout-0?" in cli("logs", "rolout-0").error
    assert "no life begins with 7; there are 1-aa, 2-bb" in cli("logs", "rollout-0", "--incarnation", "7").error


def test_following_goes_into_the_next_life_and_ends_with_the_run(here: Path) -> None:
    """Another process follows; this one is the run."""
    resolved = resolve("grpo-arithmetic")
    with RunDirectory.create(here / "run", digest(resolved), run_id="x", resolved=resolved_text(resolved)) as run:
        run.log("policy-0", "1-a").parent.mkdir()
        run.log("policy-0", "1-a").write_text("first\n")
        code = "import sys; from cosmos_actor.cli import main; sys.exit(main(['logs', 'run', 'policy-0', '-f']))"
        reader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                  text=True)
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "first\n"
            with run.log("policy-0", "1-a").open("a") as log:
                log.write("second\n")
            assert reader.stdout.readline() == "second\n"
            run.log("policy-0", "2-b").write_text("third\n")
            assert reader.stdout.readline() == "third\n"
            run.close()
            assert reader.wait(timeout=20) == 0
        finally:
            reader.kill()
            reader.wait()
