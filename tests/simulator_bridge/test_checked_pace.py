"""What may be slow is announced before it begins: what is new to a slot, whatever its neighbours did."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cosmos_actor.simulator_bridge.checked import CheckedSession
from cosmos_actor.simulator_bridge.contract import TaskSpec
from cosmos_actor.simulator_bridge.messages import Reset, Stepped
from cosmos_actor.simulator_bridge.pace import Pace
from tests.simulator_bridge.test_checked import Asked, assigned
from tests.simulator_bridge.worlds import LIMIT, Counter, CounterSimulator, unit


def test_the_first_calls_of_each_slot_in_each_task_are_announced() -> None:
    """Each slot opens a world of its own: that another's was quick when it was open already says nothing."""
    announced: list[str] = []
    pace = Pace(lambda label, seconds: announced.append(label) if seconds else None)
    asked = Asked(2)
    asked.session = CheckedSession(CounterSimulator("counter:1", Counter).open(2), TWO_TASKS, 2, pace=pace)

    def of(made: Stepped) -> list[str]:
        assert made.failures == []
        told, announced[:] = list(announced), []
        return told

    def step(slots: list[int]) -> Stepped:
        return asked.step(slots, [[0]] * len(slots))

    first, other = unit(), replace(unit(), task="other")
    assert of(asked.reset({0: first})) == ["reset count", "observe"]
    assert of(asked.reset({0: first})) == []
    assert of(step([0])) == ["step"]
    assert of(step([0])) == []
    assert of(asked.reset({1: first})) == ["reset count", "observe"]
    assert of(step([0])) == [] and of(step([0, 1])) == ["step"] and of(step([0, 1])) == []
    assert of(asked.reset({1: other})) == ["reset other", "observe"]
    assert of(asked.reset({1: first})) == []


def test_a_world_that_raised_may_be_made_anew_and_that_is_announced() -> None:
    announced: list[str] = []
    pace = Pace(lambda label, seconds: announced.append(label) if seconds else None)
    asked = Asked(1)
    asked.session = CheckedSession(CounterSimulator("counter:1", Raises).open(1), TWO_TASKS, 1, pace=pace)
    asked.reset({0: unit()})
    assert [failure.kind for failure in asked.step([0], [[0]]).failures] == ["step"]
    announced.clear()
    asked.reset({0: unit()})
    assert announced == ["reset count", "observe"]


@pytest.mark.parametrize("doing", ["reset", "observe"])
def test_a_first_call_that_its_neighbour_kept_from_being_made_is_announced_when_it_is(doing: str) -> None:
    announced: list[tuple[str, float]] = []
    simulator = CounterSimulator("counter:1", Counter)

    class AllAtOnce:
        """Raises before it comes to the second slot."""

        def __init__(self) -> None:
            self.session = simulator.open(2)
            self.before: list[list[tuple[str, float]]] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(self.session, name)

        def _call(self, name: str, slots: list[int], *more: Any) -> Any:
            if name == doing and 0 in slots:
                raise RuntimeError("no")
            if name == doing:
                self.before.append(announced[-1:])
            return getattr(self.session, name)(slots, *more)

        def reset(self, slots: list[int], units: Any) -> None:
            self._call("reset", slots, units)

        def observe(self, slots: list[int]) -> Any:
            return self._call("observe", slots)

    session = AllAtOnce()
    pace = Pace(lambda label, seconds: announced.append((label, seconds)))
    checked = CheckedSession(session, simulator.describe(), 2, pace=pace)  # type: ignore[arg-type]
    answer = checked.answer(Reset(1, assigned({0: unit(), 1: unit()})))
    assert [failure.slot for failure in answer.failures] == [0]
    [[(label, seconds)]] = session.before
    assert label.startswith(doing) and seconds > 0


class Raises(Counter):
    def step(self, action: Any) -> Any:
        raise RuntimeError("no")


TWO_TASKS = replace(CounterSimulator("counter:1", Counter).describe(),
                    tasks=[TaskSpec("count", LIMIT), TaskSpec("other", LIMIT)])
