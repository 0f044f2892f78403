"""An actor that no restart would help ends the job, however slowly it fails, and its reason is all that is told."""

from __future__ import annotations

import pytest

from cosmos_actor.actors.runtime import HEAD_GONE
from cosmos_actor.job.starts import MOST_IN_VAIN, Starts
from tests.job.runs import Run

BROKEN_TASK = """
from cosmos_actor.tasks.arithmetic import ArithmeticTask

def make_task(settings, seed):
    raise RuntimeError("no licence for the grader")
"""

LICENSED_TASK = """
import os, sys
from cosmos_actor.tasks.arithmetic import make_task as arithmetic

def make_task(settings, seed):
    return Licensed(arithmetic(settings, seed))

class Licensed:
    def __init__(self, inner):
        self.problem, self.answer = inner.problem, inner.answer

    def reward(self, payload, text):
        print("error: the grader's licence is over (setting `data.task`)", file=sys.stderr, flush=True)
        os._exit(2)
"""
UNLICENSED_MODEL = """
import os

if "UNLICENSED" in os.environ:
    from cosmos_actor.actors.errors import BadValue
    from cosmos_actor.trainer import policy

    def refuse(*arguments, **more):
        raise BadValue("the model's licence is over", setting="policy.model")

    policy.load_trained_model = refuse
"""

WHY = "exit 1: RuntimeError: no licence"


def test_lives_in_vain_are_counted_in_a_row_and_by_actor():
    starts = Starts()
    ends = [starts.ended("policy-0", str(life), WHY) for life in range(MOST_IN_VAIN)]
    assert ends == [False] * (MOST_IN_VAIN - 1) + [True]
    assert not starts.ended("rollout-0", "a", WHY)


def test_a_life_that_served_begins_the_count_anew():
    starts = Starts()
    for round_number in range(5):
        assert not starts.ended("policy-0", f"{round_number}-in-vain", WHY)
        starts.served("policy-0", f"{round_number}-good")
        assert not starts.ended("policy-0", f"{round_number}-good", WHY)


def test_a_life_that_was_cut_off_from_the_run_was_not_in_vain():
    starts = Starts()
    for number in range(2 * MOST_IN_VAIN):
        assert not starts.ended("policy-0", str(number), f"exit 1: error: {HEAD_GONE}: stale incarnation 1-a")


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_role_that_can_not_be_set_up_ends_the_job_with_its_reason(run: Run, monkeypatch: pytest.MonkeyPatch):
    (run.recipe.parent / "broken_task.py").write_text(BROKEN_TASK)
    monkeypatch.setenv("PYTHONPATH", str(run.recipe.parent), prepend=":")
    run.wait(run.start(sets=["data.task=broken_task:make_task"]), code=1)
    said = run.output.read_text()
    assert f"ended {MOST_IN_VAIN} times in a row before it was ready: exit 1: RuntimeError: no licence" in said
    assert not run.processes()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("actor", "settings", "line"), [
    ("reward-0", ["data.task=licensed:make_task"], "the grader's licence is over (setting `data.task`)"),
    ("policy-0", ["policy.env.UNLICENSED='yes'"], "the model's licence is over (setting `policy.model`)")])
def test_when_an_actor_ends_the_job_nothing_else_is_told_than_why(
        run: Run, monkeypatch: pytest.MonkeyPatch, actor: str, settings: list[str], line: str):
    """The policy is stopped before the controller, which then misses it; or misses it before its process has ended."""
    (run.recipe.parent / "licensed.py").write_text(LICENSED_TASK)
    (run.recipe.parent / "sitecustomize.py").write_text(UNLICENSED_MODEL)
    monkeypatch.setenv("PYTHONPATH", str(run.recipe.parent), prepend=":")
    run.wait(run.start(sets=settings), code=2)
    said = [line for line in run.output.read_text().splitlines() if not line.startswith("step ")]
    assert [line.partition(" ")[0] for line in said] == ["run", "ledger", "error:", "report"]
    assert said[2] == f"error: {actor}: exit 2: error: {line}"
