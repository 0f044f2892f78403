"""Requests in, answers out: chunks, queues, limits, and every fault a failure of its own slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cosmos_actor.simulator_bridge.checked import CheckedSession
from cosmos_actor.simulator_bridge.checks import BadRequest
from cosmos_actor.simulator_bridge.contract import (
    BOX,
    KINDS,
    SUCCESS,
    ActionSpec,
    ArraySpec,
    Description,
    Outcome,
    SimSession,
    TaskSpec,
    WorkUnit,
)
from cosmos_actor.simulator_bridge.messages import Assignment, Reset, Step, Stepped
from tests.simulator_bridge.worlds import LIMIT, Counter, CounterSimulator, unit


class Asked:
    """A checked session of counters, with its requests numbered."""

    def __init__(self, envs: int, session: SimSession | None = None, description: Description | None = None) -> None:
        self.worlds: list[Counter] = []
        simulator = CounterSimulator("counter:1", self._world)
        self.session = CheckedSession(
            session or simulator.open(envs), description or simulator.describe(), envs)
        self.number = 0

    def _world(self) -> Counter:
        self.worlds.append(Counter())
        return self.worlds[-1]

    def reset(self, units: dict[int, WorkUnit], queue: dict[int, WorkUnit] | None = None) -> Stepped:
        self.number += 1
        return self.session.answer(Reset(self.number, assigned(units), assigned(queue or {})))

    def step(self, slots: list[int], actions: Any, queue: dict[int, WorkUnit] | None = None, **more: Any) -> Stepped:
        self.number += 1
        return self.session.answer(
            Step(self.number, np.array(actions), np.array(slots, np.int32), assigned(queue or {}), **more))


def assigned(units: dict[int, WorkUnit]) -> list[Assignment]:
    return [Assignment(slot, item) for slot, item in units.items()]


def seen(stepped: Stepped) -> list[list[float]]:
    return stepped.observations["count"].tolist()


# ---- chunks


def test_a_reset_shows_the_first_observations() -> None:
    stepped = Asked(3).reset({2: unit(seed=7), 0: unit(seed=5)})
    assert stepped.slots.tolist() == [2, 0]
    assert seen(stepped) == [[7, 0], [5, 0]]
    assert stepped.rewards.shape == (2, 0)
    assert stepped.ended.size == 0 and stepped.failures == []


def test_a_chunk_is_executed_whole_and_seen_once() -> None:
    asked = Asked(2)
    asked.reset({0: unit(), 1: unit(seed=1)})
    looks = [world.looks for world in asked.worlds]
    stepped = asked.step([1, 0], [[1, 2, 3], [3, 0, 1]])
    assert seen(stepped) == [[1, 6], [0, 4]]
    assert stepped.rewards[1, 0] == 3.0 and stepped.rewards.dtype == np.float32
    assert stepped.steps.tolist() == [3, 3]
    assert [world.looks for world in asked.worlds] == [count + 1 for count in looks]


def test_a_slot_stops_where_its_episode_ends() -> None:
    asked = Asked(2)
    asked.reset({0: unit(), 1: unit()})
    stepped = asked.step([0, 1], [[3, 3, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1]])
    assert stepped.steps.tolist() == [4, 6]
    assert stepped.rewards[0].tolist() == [3, 1, 1, 1, 0, 0]
    assert stepped.terminated.tolist() == [1, 0] and stepped.truncated.tolist() == [0, 0]
    assert stepped.success[0] == SUCCESS
    assert stepped.ended.tolist() == [0]
    assert stepped.final_observations["count"].tolist() == [[0, 12]]
    assert seen(stepped) == [[0, 12], [0, 6]]
    assert [world.steps for world in asked.worlds] == [4, 6]


def test_a_slot_without_a_queued_unit_is_idle_after_its_episode() -> None:
    asked = Asked(1)
    asked.reset({0: unit()})
    asked.step([0], [[3, 3, 3, 3]])
    with pytest.raises(BadRequest, match=r"slots \[0\] are idle"):
        asked.step([0], [[1]])


def test_a_queued_unit_begins_in_the_same_answer() -> None:
    asked = Asked(2)
    asked.reset({0: unit(seed=1), 1: unit(seed=2)}, queue={0: unit(seed=3)})
    stepped = asked.step([1, 0], [[1, 1, 1, 1], [3, 3, 3, 3]])
    assert seen(stepped) == [[2, 4], [3, 0]]
    assert stepped.ended.tolist() == [0]
    assert stepped.final_observations["count"].tolist() == [[1, 12]]
    assert seen(asked.step([0], [[1]])) == [[3, 1]]


def test_what_is_queued_later_takes_the_place_of_what_was() -> None:
    asked = Asked(1)
    asked.reset({0: unit(seed=1)}, queue={0: unit(seed=2)})
    assert seen(asked.step([0], [[3, 3, 3, 3]], queue={0: unit(seed=9)})) == [[9, 0]]


def test_a_reset_forgets_what_was_queued() -> None:
    asked = Asked(1)
    asked.reset({0: unit(seed=1)}, queue={0: unit(seed=2)})
    asked.reset({0: unit(seed=3)})
    assert seen(asked.step([0], [[3, 3, 3, 3]])) == [[3, 12]]


def test_the_unit_or_else_the_task_says_when_an_episode_is_cut_off() -> None:
    asked = Asked(2)
    asked.reset({0: unit(max_steps=2), 1: unit()})
    stepped = asked.step([0, 1], np.zeros((2, LIMIT + 5), np.int64))
    assert stepped.steps.tolist() == [2, LIMIT]
    assert stepped.truncated.tolist() == [1, 1] and stepped.terminated.tolist() == [0, 0]
    assert stepped.ended.tolist() == [0, 1]


def test_an_episode_that_is_over_with_its_last_step_is_not_cut_off() -> None:
    asked = Asked(1)
    asked.reset({0: unit(max_steps=4)})
    stepped = asked.step([0], [[3, 3, 3, 3]])
    assert stepped.terminated.tolist() == [1] and stepped.truncated.tolist() == [0]


def test_the_next_episode_has_a_limit_of_its_own() -> None:
    asked = Asked(1)
    asked.reset({0: unit(max_steps=2)}, queue={0: unit(seed=1, max_steps=3)})
    asked.step([0], [[0, 0, 0]])
    assert asked.step([0], [[0, 0, 0, 0]]).steps.tolist() == [3]


def test_what_lies_between_is_shown_when_asked_for() -> None:
    asked = Asked(2)
    asked.reset({0: unit(), 1: unit(seed=1)})
    stepped = asked.step([0, 1], [[3, 3, 3, 3, 3], [1, 1, 1, 1, 1]], intermediate=True)
    counts = stepped.intermediate["count"]
    assert counts.shape == (2, 4, 2)
    assert counts[1].tolist() == [[1, 1], [1, 2], [1, 3], [1, 4]]
    assert counts[0, :, 1].tolist() == [3, 6, 9, 0]
    assert Asked(1).session.answer(Reset(1, assigned({0: unit()}))).intermediate == {}


# ---- numbers of requests


def test_a_request_that_was_answered_is_not_made_again() -> None:
    asked = Asked(1)
    asked.reset({0: unit()})
    first = asked.step([0], [[1]])
    asked.number -= 1
    assert asked.step([0], [[1]]) is first
    assert asked.worlds[0].steps == 1


def test_an_older_request_is_refused() -> None:
    asked = Asked(1)
    asked.reset({0: unit()})
    asked.step([0], [[1]])
    asked.number = 0
    with pytest.raises(BadRequest, match="request 1 is older than the last one, 2"):
        asked.reset({0: unit()})


def test_a_step_that_names_no_slots_is_of_all() -> None:
    asked = Asked(3)
    asked.reset({2: unit(seed=2), 1: unit(seed=1), 0: unit()})
    stepped = asked.session.answer(Step(2, np.array([[1], [2], [3]])))
    assert stepped.slots.tolist() == [0, 1, 2]
    assert seen(stepped) == [[0, 1], [1, 2], [2, 3]]


def test_somebody_else_counts_anew_and_finds_every_slot_idle() -> None:
    asked = Asked(1)
    asked.reset({0: unit()}, queue={0: unit(seed=5)})
    asked.session.forget()
    asked.number = 0
    with pytest.raises(BadRequest, match="idle"):
        asked.step([0], [[1]])
    asked.number = 0
    asked.reset({0: unit(seed=2)})
    assert seen(asked.step([0], [[3, 3, 3, 3]])) == [[2, 12]]


@pytest.mark.parametrize(("slots", "actions", "words"), [
    ([0, 0], [[1], [1]], "named twice"),
    ([2], [[1]], "no slot 2: this session has 2"),
    ([-1], [[1]], "no slot -1"),
    ([0], [1], "actions have shape"),
    ([0], [[1], [1]], "1 slots need"),
    ([0], [[4]], "actions go from 4 to 4, this simulator has 0 to 3"),
    ([0], [[0.5]], "whole numbers"),
])
def test_a_request_that_makes_no_sense_changes_nothing(slots: list[int], actions: Any, words: str) -> None:
    asked = Asked(2)
    asked.reset({0: unit(), 1: unit()})
    with pytest.raises(BadRequest, match=words):
        asked.step(slots, actions)
    asked.number -= 1
    assert seen(asked.step([0, 1], [[1], [1]])) == [[0, 1], [0, 1]]


# ---- failures


@pytest.mark.parametrize(("task", "kind", "words"), [
    ("raise in step", "step", "step raised RuntimeError: the arm fell off"),
    ("exit in step", "step", "step raised SystemExit: 5"),
    ("panic in step", "step", "step raised Panic: index out of bounds"),
    ("no reward", "step", "NoneType"),
    ("nan reward", "not_finite", "the reward is nan"),
    ("raise in observe", "observe", "observe raised OSError: no display"),
    ("wrong shape", "shape", "observation `count` has shape [1], the description says [2]"),
    ("wrong dtype", "shape", "observation `count` is float64, the description says float32"),
    ("wrong name", "shape", "observe gave ['sum'], the description says ['count']"),
    ("no array", "shape", "the description says"),
    ("nan", "not_finite", "observation `count` is NaN or infinite"),
])
def test_a_fault_fails_its_slot_and_no_other(task: str, kind: str, words: str) -> None:
    asked = Asked(3)
    asked.reset({0: unit(seed=1), 1: unit(task), 2: unit(seed=2)}, queue={1: unit()})
    stepped = asked.step([0, 1, 2], [[1, 1], [1, 1], [1, 1]])
    (failure,) = stepped.failures
    assert (failure.slot, failure.kind) == (1, kind)
    assert failure.kind in KINDS
    assert words in failure.text and "\n" not in failure.text
    assert failure.text.startswith(f"counter:1, task {task}, slot 1: ")
    assert stepped.slots.tolist() == [0, 2]
    assert seen(stepped) == [[1, 2], [2, 2]]
    assert stepped.rewards.tolist() == [[1, 1], [1, 1]]
    with pytest.raises(BadRequest, match="idle"):
        asked.step([1], [[1]])
    assert seen(asked.reset({1: unit(seed=4)})) == [[4, 0]]
    assert seen(asked.step([1], [[3, 3, 3, 3]])) == [[4, 12]]  # and nothing is queued from before


def test_a_reset_that_raises_fails_its_slot() -> None:
    stepped = Asked(2).reset({0: unit("raise in reset"), 1: unit(seed=3)})
    assert [(failure.slot, failure.kind) for failure in stepped.failures] == [(0, "reset")]
    assert "reset raised RuntimeError: no such kitchen" in stepped.failures[0].text
    assert stepped.slots.tolist() == [1]


@pytest.mark.parametrize(("wrong", "words"), [
    (unit("fly"), "has no task `fly`; it has count, "),
    (unit(initial_state=3), "there is no initial state 3: it has 0"),
])
def test_a_unit_that_is_not_there_fails_before_the_simulator_hears_of_it(wrong: WorkUnit, words: str) -> None:
    asked = Asked(2)
    stepped = asked.reset({0: wrong, 1: unit()})
    assert [(failure.slot, failure.kind) for failure in stepped.failures] == [(0, "reset")]
    assert words in stepped.failures[0].text
    assert asked.worlds[0].resets == 0


def test_an_episode_counts_when_it_is_the_next_one_that_can_not_begin() -> None:
    asked = Asked(1)
    asked.reset({0: unit(seed=1)}, queue={0: unit("raise in reset")})
    stepped = asked.step([0], [[3, 3, 3, 3]])
    assert stepped.slots.tolist() == [0] and stepped.ended.tolist() == [0]
    assert stepped.final_observations["count"].tolist() == [[1, 12]]
    assert [(failure.slot, failure.kind) for failure in stepped.failures] == [(0, "reset")]
    assert "task raise in reset" in stepped.failures[0].text
    with pytest.raises(BadRequest, match="idle"):
        asked.step([0], [[1]])


def test_all_slots_can_fail() -> None:
    asked = Asked(2)
    asked.reset({0: unit("raise in step"), 1: unit("nan")})
    stepped = asked.step([0, 1], [[1, 1, 1], [1, 1, 1]])
    assert [failure.slot for failure in stepped.failures] == [0, 1]
    assert stepped.slots.size == 0
    assert stepped.observations["count"].shape == (0, 2)
    assert stepped.rewards.shape == (0, 3)


class Batch(SimSession):
    """Steps all slots in one piece, in memory that it uses again."""

    def __init__(self, envs: int) -> None:
        self.memory = np.zeros((envs, 2), np.float32)
        self.resets: list[list[int]] = []
        self.faulty: int | None = None
        self.rewards: Any = None

    def reset(self, slots: Any, units: Any) -> None:
        self.resets.append(list(slots))
        if self.faulty in slots:
            raise RuntimeError("out of memory")
        self.memory[slots] = [[item.seed, 0] for item in units]

    def step(self, slots: Any, actions: np.ndarray) -> Outcome:
        if self.faulty in slots:
            raise RuntimeError("device lost")
        self.memory[slots, 1] += actions
        no = np.zeros(len(slots), bool)
        return Outcome(np.ones(len(slots)) if self.rewards is None else self.rewards, no, no)

    def observe(self, slots: Any) -> dict[str, np.ndarray]:
        return {"count": self.memory[:len(slots)] if list(slots) == list(range(len(slots))) else self.memory[slots]}


def batch(envs: int) -> tuple[Batch, Asked]:
    session = Batch(envs)
    return session, Asked(envs, session, CounterSimulator("batch").describe())


def test_an_answer_does_not_change_when_the_simulator_goes_on() -> None:
    _, asked = batch(2)
    first = asked.reset({0: unit(), 1: unit()})
    asked.step([0, 1], [[1], [1]])
    assert seen(first) == [[0, 0], [0, 0]]


def test_a_reset_of_all_that_raises_is_tried_slot_by_slot() -> None:
    session, asked = batch(3)
    session.faulty = 1
    stepped = asked.reset({0: unit(), 1: unit(), 2: unit()})
    assert [failure.slot for failure in stepped.failures] == [1]
    assert session.resets == [[0, 1, 2], [0], [1], [2]]


def test_a_step_of_all_that_raises_fails_all_since_it_is_not_done_again() -> None:
    session, asked = batch(3)
    asked.reset({0: unit(), 1: unit(), 2: unit()})
    session.faulty = 1
    stepped = asked.step([0, 1], [[1], [1]])
    assert [(failure.slot, failure.kind) for failure in stepped.failures] == [(0, "step"), (1, "step")]
    assert seen(asked.step([2], [[1]])) == [[0, 1]]


@pytest.mark.parametrize("rewards", [np.ones(3), np.ones((2, 1)), np.array(["a", "b"]), None])
def test_rewards_of_another_shape_fail_the_call(rewards: Any) -> None:
    session, asked = batch(2)
    asked.reset({0: unit(), 1: unit()})
    session.rewards = rewards if rewards is not None else np.array([object(), object()])
    stepped = asked.step([0, 1], [[1], [1]])
    assert [failure.kind for failure in stepped.failures] == ["shape", "shape"]
    assert "`rewards` of a step has shape" in stepped.failures[0].text


# ---- actions of a box


def test_actions_of_a_box_are_float32_within_its_bounds() -> None:
    got: list[np.ndarray] = []

    class Arm(Batch):
        def step(self, slots: Any, actions: np.ndarray) -> Outcome:
            got.append(actions)
            return super().step(slots, np.zeros(len(slots)))

    description = Description(
        "arm", [TaskSpec("count", 0)], {"count": ArraySpec("float32", (2,))},
        ActionSpec(BOX, shape=(2,), low=(-1.0, -2.0), high=(1.0, 2.0)))
    asked = Asked(1, Arm(1), description)
    asked.reset({0: unit()})
    asked.step([0], [[[3.0, 0.5]]])
    assert got[0].tolist() == [[1.0, 0.5]] and got[0].dtype == np.float32
    with pytest.raises(BadRequest, match="an action is NaN"):
        asked.step([0], [[[np.nan, 0.0]]])
    with pytest.raises(BadRequest, match="float32"):
        asked.step([0], np.zeros((1, 1, 2), np.int64))


def test_a_task_without_a_limit_goes_on() -> None:
    description = Description("free", [TaskSpec("count", 0)], {"count": ArraySpec("float32", (2,))},
                              CounterSimulator("").describe().action)
    asked = Asked(1, Batch(1), description)
    asked.reset({0: unit()})
    assert asked.step([0], np.zeros((1, 3000), np.int64)).truncated.tolist() == [0]


def test_infinities_pass_where_the_description_allows_them() -> None:
    class Far(Batch):
        def observe(self, slots: Any) -> dict[str, np.ndarray]:
            return {"count": np.full((len(slots), 2), np.inf, np.float32)}

    description = Description("far", [TaskSpec("count", 0)], {"count": ArraySpec("float32", (2,), finite=False)},
                              CounterSimulator("").describe().action)
    assert Asked(1, Far(1), description).reset({0: unit()}).failures == []


def test_a_simulator_without_actions_left_to_do_does_nothing() -> None:
    asked = Asked(1)
    asked.reset({0: unit(seed=3)})
    stepped = asked.step([0], np.zeros((1, 0), np.int64))
    assert stepped.steps.tolist() == [0] and seen(stepped) == [[3, 0]]


def test_a_long_error_is_cut() -> None:
    class Wordy(Counter):
        def reset(self, item: WorkUnit) -> None:
            raise RuntimeError("x" * 10_000)

    session = CheckedSession(CounterSimulator("w", Wordy).open(1), CounterSimulator("w").describe(), 1)
    (failure,) = session.answer(Reset(1, assigned({0: unit()}))).failures
    assert len(failure.text) <= 500
