"""`up` around a launch that is played: run directories, progress, the report, exit codes, resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cosmos_actor.job.launch as job_launch
from cosmos_actor.actors.errors import NotFound
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.recipes.resolved import load_resolved
from tests.cli.conftest import Cli
from tests.cli.sample_run import event_lines, metrics_lines

Launched = list[dict[str, Any]]
RECIPE = resolve("grpo-arithmetic")
LAST_STEP = RECIPE.policy.sft_steps + RECIPE.run.steps


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What `launch` was called with; it writes three steps and finishes."""
    calls: Launched = []

    def launch(settings: Any, **arguments: Any) -> Any:
        calls.append({"settings": settings, **arguments})
        directory = arguments["directory"]
        for line in metrics_lines()[20:23]:
            directory.writer(directory.metrics).append(line)
        for line in event_lines():
            directory.writer(directory.events).append(line)
        arguments["observer"].notice("all actors are here")
        return job_launch.Outcome(0, "all 3 steps are done")

    monkeypatch.setattr(job_launch, "launch", launch)
    return calls


def test_a_run_shows_its_steps_and_leaves_a_report(cli: Cli, here: Path, launched: Launched) -> None:
    answer = cli("up", "grpo-arithmetic", "--set", "run.seed=3")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert [line for line in lines if line.startswith("step ")][0].startswith(f"step 21/{LAST_STEP} grpo · reward 0.3")
    assert "all actors are here" in lines and lines[-1] == "all 3 steps are done"
    run = here / "runs" / "grpo-arithmetic-1"
    assert "all 3 steps are done" in (run / "report.html").read_text()
    assert (here / "runs" / "latest").resolve() == run
    assert load_resolved(run / "config.resolved.toml") == launched[0]["settings"]
    assert launched[0]["settings"].run.seed == 3
    assert (launched[0]["inproc"], launched[0]["listen"]) == (False, None)


def test_where_to_listen_becomes_part_of_the_settings(cli: Cli, here: Path, launched: Launched) -> None:
    assert cli("up", "grpo-arithmetic", "--listen", "tcp://127.0.0.1:0", "--inproc").code == 0
    assert launched[0]["settings"].bus.host == "127.0.0.1"
    assert (launched[0]["inproc"], launched[0]["listen"]) == (True, "tcp://127.0.0.1:0")


def test_one_process_for_all_roles_is_what_grouping_single_asks_for(cli: Cli, here: Path, launched: Launched) -> None:
    assert cli("up", "grpo-arithmetic", "--set", "run.grouping=single").code == 0
    assert launched[0]["inproc"] is True


def test_two_runs_get_two_directories(cli: Cli, here: Path, launched: Launched) -> None:
    for _ in range(2):
        assert cli("up", "grpo-arithmetic").code == 0
    assert [call["directory"].root.name for call in launched] == ["grpo-arithmetic-1", "grpo-arithmetic-2"]


def test_resuming_goes_on_with_the_newest_run_under_its_own_settings(cli: Cli, here: Path, launched: Launched) -> None:
    cli("up", "grpo-arithmetic", "--set", "run.seed=3")
    assert cli("up", "grpo-arithmetic", "--resume", "--set", "run.steps=500").code == 0
    assert cli("up", "--resume", "--run-dir", "latest").code == 0
    assert {call["directory"].root.name for call in launched} == {"grpo-arithmetic-1"}
    runs = [call["settings"].run for call in launched]
    assert [(run.seed, run.steps) for run in runs] == [(3, RECIPE.run.steps), (3, 500), (3, 500)]
    assert load_resolved(here / "runs/grpo-arithmetic-1/config.resolved.toml").run.steps == 500


def test_resuming_names_what_may_not_change(cli: Cli, here: Path, launched: Launched) -> None:
    cli("up", "grpo-arithmetic")
    assert "run.seed" in cli("up", "grpo-arithmetic", "--resume", "--set", "run.seed=4").error


def play(outcome: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_launch, "launch", lambda settings, **arguments: outcome())


def test_a_job_that_fails_still_has_a_report_and_its_exit_code(
        cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(lambda: job_launch.Outcome(1, "gave up: 11 restarts within 120 s"), monkeypatch)
    answer = cli("up", "grpo-arithmetic")
    assert answer.code == 1
    assert "error: gave up: 11 restarts within 120 s" in answer.err.splitlines()
    assert ">failed<" in (here / "runs/grpo-arithmetic-1/report.html").read_text()


def test_a_mistake_found_late_is_one_line(cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NotFound("reasoning-gym has no data set 'x'", setting="data.reasoning_gym.dataset")

    play(refuse, monkeypatch)
    answer = cli("up", "grpo-arithmetic")
    assert answer.code == 2
    assert "error: reasoning-gym has no data set 'x' (setting `data.reasoning_gym.dataset`)" in answer.err.splitlines()


def test_a_crash_is_one_line_and_its_traceback_a_file(cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(lambda: 1 / 0, monkeypatch)
    answer = cli("up", "grpo-arithmetic")
    assert answer.code == 1 and "Traceback" not in answer.err
    assert "error: ZeroDivisionError: division by zero (traceback in runs/grpo-arithmetic-1/logs/up.log)" in answer.err
    assert "ZeroDivisionError" in (here / "runs/grpo-arithmetic-1/logs/up.log").read_text()


def test_an_interrupted_run_has_a_report(cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    play(interrupt, monkeypatch)
    assert cli("up", "grpo-arithmetic").code == 130
    assert "interrupted" in (here / "runs/grpo-arithmetic-1/report.html").read_text()
