from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cosmos_actor.simulator_bridge.contract import Environment, NoExpert, SimSession, SlotErrors
from cosmos_actor.simulator_bridge.slots import EachSlot
from tests.simulator_bridge.worlds import Counter, unit


class Made:
    """Makes worlds and remembers them."""

    def __init__(self, *, fails_at: int = -1) -> None:
        self.worlds: list[Counter] = []
        self.fails_at = fails_at

    def __call__(self) -> Counter:
        if len(self.worlds) == self.fails_at:
            raise RuntimeError("no more windows")
        self.worlds.append(Counter())
        return self.worlds[-1]


def test_each_slot_is_a_world_of_its_own() -> None:
    session = EachSlot(Counter, 3)
    session.reset([0, 1, 2], [unit(seed=seed) for seed in (5, 6, 7)])
    outcome = session.step([2, 0], np.array([3, 1]))
    assert outcome.rewards.tolist() == [3.0, 1.0]
    assert session.observe([0, 1, 2])["count"].tolist() == [[5, 1], [6, 0], [7, 3]]


def test_each_world_is_asked_what_its_expert_would_do() -> None:
    session = EachSlot(Counter, 3)
    session.reset([0, 1, 2], [unit(seed=seed) for seed in (5, 6, 7)])
    session.step([1], np.array([8]))
    assert session.expert([1, 0]).tolist() == [2, 3]


@pytest.mark.parametrize("asks", [lambda: Environment.expert(Counter()),
                                  lambda: SimSession.expert(EachSlot(Counter, 1), [0])])
def test_who_has_no_expert_says_so(asks: Any) -> None:
    with pytest.raises(NoExpert, match="this simulator has no scripted expert"):
        asks()


def test_what_one_slot_raises_costs_the_others_nothing() -> None:
    session = EachSlot(Counter, 2)
    with pytest.raises(SlotErrors) as reset:
        session.reset([0, 1], [unit("raise in reset"), unit("raise in step")])
    assert list(reset.value.errors) == [0]
    session.reset([0], [unit()])
    session.step([0, 1], np.array([1, 1]))
    with pytest.raises(SlotErrors) as step:
        session.step([0, 1], np.array([2, 2]))
    assert list(step.value.errors) == [1]
    assert step.value.outcome is not None and step.value.outcome.rewards[0] == 1.0
    assert session.observe([0])["count"].tolist() == [[0, 3]]


def test_a_world_that_raised_is_closed_and_never_used_again() -> None:
    made = Made()
    session = EachSlot(made, 1)
    with pytest.raises(SlotErrors):
        session.reset([0], [unit("raise in reset")])
    assert made.worlds[0].closed
    session.reset([0], [unit(seed=3)])
    assert len(made.worlds) == 2
    assert session.observe([0])["count"].tolist() == [[3, 0]]


def test_the_end_of_a_process_is_not_charged_to_a_slot() -> None:
    class Interrupted(Counter):
        def step(self, action: object) -> tuple[float, bool, bool]:
            raise KeyboardInterrupt

    session = EachSlot(Interrupted, 1)
    session.reset([0], [unit()])
    with pytest.raises(KeyboardInterrupt):
        session.step([0], np.array([1]))


def test_no_world_stays_open() -> None:
    made = Made()
    EachSlot(made, 3).close()
    assert [world.closed for world in made.worlds] == [True] * 3
    half = Made(fails_at=2)
    with pytest.raises(RuntimeError, match="no more windows"):
        EachSlot(half, 3)
    assert [world.closed for world in half.worlds] == [True] * 2


def test_after_close_there_is_no_world_and_none_is_made() -> None:
    made = Made()
    session = EachSlot(made, 1)
    session.reset([0], [unit()])
    session.close()
    with pytest.raises(SlotErrors) as step:
        session.step([0], np.array([1]))
    with pytest.raises(SlotErrors) as reset:
        session.reset([0], [unit()])
    assert [str(raised.value.errors[0]) for raised in (step, reset)] == ["the session is closed"] * 2
    with pytest.raises(RuntimeError, match="the session is closed"):
        session.observe([0])
    assert len(made.worlds) == 1
