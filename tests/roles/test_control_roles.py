"""The roles of control but for the rollout: what they ask for, pay, and train on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cosmos_actor.actors.fragment import Fragment
from cosmos_actor.actors.trajectory import FieldAlreadyWritten, MalformedGroup
from cosmos_actor.roles.control_data import ControlDataRole
from cosmos_actor.roles.control_policy import batch_of, refuse_another_body
from cosmos_actor.roles.control_reward import ControlRewardRole
from cosmos_actor.roles.messages import ScoreRequest, TasksRequest
from cosmos_actor.roles.unit_source import in_turn, trials
from cosmos_actor.simulator_bridge.contract import BY_SEED, TaskSpec
from cosmos_actor.trainer.checkpoint import CheckpointError
from tests.roles.yard import DESCRIPTION


def fragment(terminated: list[int], truncated: list[int], **more: object) -> Fragment:
    """One of len(terminated) steps, whose last is a boundary."""
    ended = np.array(terminated, np.uint8) | np.array(truncated, np.uint8)
    boundary = ended.copy()
    boundary[-1] = 1
    steps, ends = len(ended), int(boundary.sum())
    ones = np.ones(steps, np.float32)
    bootstrap = np.where(boundary, np.float32(7), np.float32(0)).astype(np.float32)
    return Fragment(
        group_id="f000001-0000", attempt=0, task={"episodes": []}, version_dispatch=3,
        observations={"state": np.zeros((steps, 2), np.float32)}, actions=np.zeros(steps, np.int64), logprobs=-ones,
        simulator_rewards=2 * ones, boundary=boundary, terminated=np.array(terminated, np.uint8),
        truncated=np.array(truncated, np.uint8), after={"state": np.zeros((ends, 2), np.float32)},
        versions=np.full(steps, 3, np.int32), values=ones, bootstrap=bootstrap, **more)


def role(kind: type, **sim: object) -> object:
    settings = SimpleNamespace(run=SimpleNamespace(seed=5), sim=SimpleNamespace(
        **{"fragment_steps": 16, "reward_scale": 1.0, "reward_clip": 0.0, **sim}))
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    return kind(SimpleNamespace(settings=settings, clock=clock, identity=SimpleNamespace(actor="reward-0")))


def test_the_tasks_of_a_step_are_the_same_whenever_they_are_asked_for():
    data = role(ControlDataRole)
    asked = [data.tasks(TasksRequest(step=4, prompts=3, samples=1, split="train", attempt=2)).tasks for _ in range(2)]
    assert asked[0] == asked[1]
    assert [task.group_id for task in asked[0]] == ["f000004-0000", "f000004-0001", "f000004-0002"]
    assert len({task.seed for task in asked[0]}) == 3 and all(task.steps == 16 for task in asked[0])


def test_numbers_of_units_grow_with_steps_and_lives_and_fit_into_a_message():
    data = role(ControlDataRole)

    def first(step: int, life: int) -> int:
        request = TasksRequest(step=step, prompts=4, samples=1, split="train", attempt=life)
        return data.tasks(request).tasks[0].first_unit

    assert first(1, 0) < first(2, 0) < first(900_000, 0) < first(1, 1) < first(1, 2)
    assert first(10**6, 10**9) < 1 << 63


def test_what_is_in_the_place_of_others_begins_units_of_its_own() -> None:
    data = role(ControlDataRole)
    asked = [TasksRequest(step, prompts, samples=1, split=split, attempt=0)
             for step in range(1, 40) for split, prompts in (("train", 4), ("replacement", 4))]
    asked += [TasksRequest(step, 9, samples=1, split="replacement", attempt=0) for step in range(40, 80)]
    first = [task.first_unit for request in asked for task in data.tasks(request).tasks]
    assert len(set(first)) == len(first) and max(first) < data.tasks(
        TasksRequest(1, 4, samples=1, split="train", attempt=1)).tasks[0].first_unit


@pytest.mark.parametrize(("sim", "paid"), [({}, 2.0), ({"reward_scale": 0.1}, 0.2), ({"reward_clip": 1.0}, 1.0)])
def test_rewards_are_scaled_then_cut(sim, paid):
    scores = role(ControlRewardRole, **sim).score(ScoreRequest([fragment([0, 1, 0], [0, 0, 0])]))
    assert scores.columns[0].values == pytest.approx([paid] * 3) and scores.mean == pytest.approx(paid)


def test_what_follows_an_end_is_worth_nothing_and_what_follows_a_cut_is_as_the_settings_say():
    groups = [fragment([0, 1, 0, 0], [0, 0, 1, 0]).with_field("rewards", np.arange(4), "reward-0")] * 2
    went_on = batch_of(groups, bootstrap_truncated=True)
    assert went_on["bootstrap"].tolist() == [0, 0, 7, 7] * 2
    assert batch_of(groups, bootstrap_truncated=False)["bootstrap"].tolist() == [0, 0, 0, 7] * 2
    assert went_on["boundary"].tolist() == [False, True, True, True] * 2
    assert went_on["rewards"].tolist() == [0, 1, 2, 3] * 2


def test_a_fragment_has_one_writer_a_column_and_knows_its_staleness():
    given = fragment([0, 0], [0, 0])
    given.check()
    scored = given.with_field("rewards", [1.0, 2.0], "reward-0")
    with pytest.raises(FieldAlreadyWritten, match="reward-1 may not write `rewards`, reward-0 wrote it"):
        scored.with_field("rewards", [1.0, 2.0], "reward-1")
    with pytest.raises(MalformedGroup, match=r"`rewards` is \[2\], not \[3\]"):
        given.with_field("rewards", [1.0, 2.0, 3.0], "reward-0")
    assert (given.staleness(5), given.keys, given.token_count) == (2, [("f000001-0000/0", 0)], 2)


@pytest.mark.parametrize(("change", "line"), [
    ({"actions": np.zeros(3, np.int64)}, "`actions` has 2 rows"), ({"after": {}}, "`after` has the names"),
    ({"after": {"state": np.zeros((2, 2), np.float32)}}, "`after.state` has 1 rows"),
    ({"boundary": np.array([1, 0], np.uint8)}, "the last step of a fragment is a boundary")])
def test_a_fragment_that_contradicts_itself_is_refused(change, line):
    given = fragment([0, 0], [0, 0])
    broken = Fragment(**{**{name: getattr(given, name) for name in given.__dataclass_fields__}, **change})
    with pytest.raises(MalformedGroup, match=line):
        broken.check()


def test_units_take_turns_over_tasks_and_initial_states():
    unit = in_turn([TaskSpec("a", 10, initial_states=3), TaskSpec("b", 10)], seed=1)
    taken = [unit(number) for number in range(13)]
    first = [(one.task, one.initial_state) for one in taken].index(("a", 0))  # where the turns begin is drawn
    assert [one.task for one in taken[first:first + 7]] == ["a", "b", "a", "b", "a", "b", "a"]
    assert [one.initial_state for one in taken[first:first + 7]] == [0, BY_SEED, 1, BY_SEED, 2, BY_SEED, 0]
    assert len({one.seed for one in taken}) == 13 and all(0 <= one.seed < 1 << 31 for one in taken)


@pytest.mark.parametrize(("tasks", "states", "begun"), [(8, 0, 4), (16, 0, 1), (2, 8, 2), (1, 50, 3)])
def test_steps_of_few_episodes_come_to_all_tasks_and_initial_states(tasks, states, begun):
    data = role(ControlDataRole)
    unit = in_turn([TaskSpec(f"t{at}", 10, initial_states=states) for at in range(tasks)], seed=0)
    asked = [data.tasks(TasksRequest(step=step, prompts=4, samples=1, split="train", attempt=0)).tasks[0].first_unit
             for step in range(1, 301)]
    taken = [unit(first + place) for first in asked for place in range(begun)]
    assert len({(one.task, one.initial_state) for one in taken}) == tasks * max(states, 1)


def test_a_checkpoint_of_another_body_is_refused(tmp_path):
    (tmp_path / "simulator.json").write_text('{"embodiment": "abc"}')
    with pytest.raises(CheckpointError, match="is of embodiment abc, test:count has none"):
        refuse_another_body(tmp_path, DESCRIPTION)
    (tmp_path / "simulator.json").write_text('{"embodiment": ""}')
    refuse_another_body(tmp_path, DESCRIPTION)
    (tmp_path / "simulator.json").write_text("{")
    with pytest.raises(CheckpointError, match="can not be read"):
        refuse_another_body(tmp_path, DESCRIPTION)


def test_trials_are_the_same_every_time_and_go_through_the_initial_states():
    description = replace(DESCRIPTION, tasks=[TaskSpec("a", 10, initial_states=2), TaskSpec("b", 10), TaskSpec("c", 5)])
    asked = [trials(description, ("a", "b"), 3, seed=4) for _ in range(2)]
    assert asked[0] == asked[1]
    assert [(unit.unit_id, unit.initial_state) for unit in asked[0]] == [
        ("a/0", 0), ("a/1", 1), ("a/2", 0), ("b/0", BY_SEED), ("b/1", BY_SEED), ("b/2", BY_SEED)]
    assert len({unit.seed for unit in asked[0]}) == 6
    assert {unit.task for unit in trials(description, (), 1, seed=4)} == {"a", "b", "c"}
