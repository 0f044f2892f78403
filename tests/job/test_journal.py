"""One line a step; a rewound job forgets what it will do again, and its time goes on."""

from __future__ import annotations

import pytest

from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.job.journal import Journal


class ManualClock:
    def __init__(self) -> None:
        self.time = 100.0

    def monotonic(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def journal(tmp_path, clock):
    made = Journal(tmp_path / "metrics.jsonl", clock)
    yield made
    made.close()


def walk(journal: Journal, clock: ManualClock, step: int, seconds: float = 2.0) -> None:
    journal.begin(step)
    clock.time += seconds
    journal.add("grpo", {"loss/total": 0.5, "tokens": 100})
    journal.spent("generate", 1.0)
    journal.spent("update", 0.5)
    journal.finish(rollouts=1)


def test_a_step_is_one_line_with_the_time_that_each_side_waited(journal, clock, tmp_path):
    walk(journal, clock, 1)
    [line] = read_json_lines(tmp_path / "metrics.jsonl")
    assert line["step"] == 1 and line["phase"] == "grpo" and line["time"] == 2.0 and line["tokens/s"] == 50.0
    assert line["wait/rollout"] == 1.0 and line["wait/policy"] == 1.5 and line["time/update"] == 0.5


def test_of_a_peak_the_highest_of_the_step_counts(journal, clock, tmp_path):
    journal.begin(1)
    for value in (3, 7, 5):
        journal.highest("memory/rollout_peak_bytes", value)
    journal.finish(rollouts=1)
    walk(journal, clock, 2)
    first, second = read_json_lines(tmp_path / "metrics.jsonl")
    assert first["memory/rollout_peak_bytes"] == 7 and "memory/rollout_peak_bytes" not in second


def test_two_rollouts_share_the_generating(journal, clock, tmp_path):
    journal.begin(1)
    clock.time += 1.0
    journal.spent("generate", 1.5)
    journal.finish(rollouts=2)
    assert read_json_lines(tmp_path / "metrics.jsonl")[0]["wait/rollout"] == 0.25


def test_after_a_roll_back_the_lines_and_the_time_go_on_from_there(journal, clock, tmp_path):
    for step in (1, 2, 3):
        walk(journal, clock, step)
    clock.time += 1000.0
    journal.roll_back(2)
    walk(journal, clock, 3)
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["time"]) for line in lines] == [(1, 2.0), (2, 4.0), (3, 6.0)]


def test_an_evaluation_is_remembered_unless_it_was_rolled_back(journal, clock):
    journal.evaluation(4, {"eval/accuracy": 0.5, "eval/problems": 200})
    journal.roll_back(4)
    assert journal.evaluated == {4}
    journal.roll_back(3)
    assert journal.evaluated == set()
