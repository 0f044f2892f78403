"""The controller goes back as often as that brings the job on, and says how it ended."""

from __future__ import annotations

from typing import Any

import pytest

from cosmos_actor.actors.context import SystemClock
from cosmos_actor.actors.dead_letters import Poison
from cosmos_actor.actors.errors import NotFound
from cosmos_actor.actors.fleet import StateLost
from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.actors.runtime import HeadLost
from cosmos_actor.bus.errors import RemoteError
from cosmos_actor.job import controller
from cosmos_actor.job.controller import FAILED, FINISHED, MOST_REWINDS, STOPPED, ControllerProcess, run_recipe
from cosmos_actor.job.intake import ShortSample
from cosmos_actor.job.job import Job, StopAsked


class PlayedJob:
    """`script`: for each life the step it reaches and what ends it; None is the end of the recipe."""

    settings = type("Settings", (), {"run": type("Run", (), {"loop": "played"})})
    last_step = 9

    def __init__(self, *script: tuple[int, BaseException | None]) -> None:
        self.script = list(script)
        self.step = 0
        self.reasons: list[str] = []
        self.closed = False

    def restore(self, reason: str) -> None:
        self.reasons.append(reason)
        self.step = 0

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(monkeypatch):
    def loop(job: PlayedJob) -> None:
        job.step, error = job.script.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(controller, "load_recipe", lambda name: loop)

    def run(*script: tuple[int, BaseException | None]) -> tuple[Any, PlayedJob]:
        job = PlayedJob(*script)
        try:
            return run_recipe(job, lambda reason: None), job
        finally:
            assert job.closed

    return run


def test_a_lost_state_is_a_reason_to_go_back_and_go_on(run):
    word, job = run((3, StateLost("policy-0 is gone")), (9, None))
    assert (word.outcome, word.exit_code) == (FINISHED, 0)
    assert job.reasons == ["the controller started", "policy-0 is gone"]


def test_rewinds_that_bring_the_job_no_step_further_end_it(run):
    with pytest.raises(StateLost, match="again"):
        run(*[(3, StateLost("again"))] * (MOST_REWINDS + 1))


def test_rewinds_that_bring_the_job_further_may_be_many(run):
    word, _ = run(*[(step, StateLost("again")) for step in range(3 * MOST_REWINDS)], (99, None))
    assert word.outcome == FINISHED


@pytest.mark.parametrize("mistake", [NotFound("no file x", setting="policy.model"),
                                     RemoteError("NotFound", "no file x (setting `policy.model`)")])
def test_a_mistake_of_the_user_ends_the_job_wherever_it_was_noticed(run, mistake):
    word, _ = run((0, mistake))
    assert (word.outcome, word.exit_code, word.reason) == (FAILED, 2, "no file x (setting `policy.model`)")


def test_any_other_failure_of_a_role_rises(run):
    with pytest.raises(RemoteError, match="ValueError"):
        run((0, RemoteError("ValueError", "a bug")))


def test_a_stop_says_after_which_step(run):
    word, _ = run((4, StopAsked("asked to stop")))
    assert (word.outcome, word.exit_code) == (STOPPED, 0) and "after step 4 of 9" in word.reason


def test_a_failure_ends_the_job_with_its_line_and_its_traceback_is_in_the_log(monkeypatch, capsys):
    def fails(job: Any, on_rewind: Any) -> None:
        raise RemoteError("ValueError", "a bug in a reward")

    monkeypatch.setattr(controller, "run_recipe", fails)
    word = object.__new__(ControllerProcess)._run_recipe(PlayedJob())
    assert (word.outcome, word.exit_code, word.reason) == (FAILED, 1, "RemoteError: ValueError: a bug in a reward")
    assert "Traceback" in capsys.readouterr().err


def test_without_a_head_there_is_nobody_to_tell(monkeypatch):
    def fails(job: Any, on_rewind: Any) -> None:
        raise HeadLost("the head of the run is gone")

    monkeypatch.setattr(controller, "run_recipe", fails)
    with pytest.raises(HeadLost):
        object.__new__(ControllerProcess)._run_recipe(PlayedJob())


def test_a_rewind_is_an_event_of_the_run(tmp_path, monkeypatch):
    job = object.__new__(Job)
    job.paths, job.clock = RunPaths(tmp_path), SystemClock()
    monkeypatch.setattr(controller, "run_recipe", lambda job, on_rewind: on_rewind("policy-0 is gone"))
    object.__new__(ControllerProcess)._run_recipe(job)
    [event] = read_json_lines(job.paths.events)
    assert (event["event"], event["reason"]) == ("rewind", "policy-0 is gone")


@pytest.mark.parametrize("end", [Poison("policy update 7 killed 2 actors"), ShortSample("step 7 has 0 of 8 groups")])
def test_what_the_job_found_out_about_itself_ends_it_with_that_line(run, end):
    last_word, _ = run((3, end))
    assert (last_word.outcome, last_word.reason, last_word.exit_code) == (FAILED, str(end), 1)
