"""The suite for simulators: it passes what keeps the contract, and each fault is found by the check named for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cosmos_actor.simulator_bridge.conformance import (
    BASICS,
    CHECKS,
    OK,
    SKIPPED,
    Verdict,
    judge,
    name_of,
    of_episodes,
    run,
)
from cosmos_actor.simulator_bridge.conformance.bench import Bench
from cosmos_actor.simulator_bridge.conformance.held import growth
from cosmos_actor.simulator_bridge.contract import Simulator
from cosmos_actor.simulator_bridge.plugins import SimulatorName, load
from cosmos_actor.simulator_bridge.template import Push, World
from tests.simulator_bridge import faulty
from tests.simulator_bridge.faulty import of, with_a_body

EXPERT = "the expert acts within its bounds"


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    faulty.give_back()


def verdicts(simulator: Simulator, *names: str, envs: int = 2) -> dict[str, Verdict]:
    """Of the basics and the checks named."""
    bench = Bench(simulator, "", envs, 50)
    chosen = [check for check in CHECKS if check in BASICS or name_of(check) in names]
    assert {name_of(check) for check in chosen} >= set(names)
    return {verdict.check: verdict for verdict in (judge(check, bench) for check in chosen)}


def not_ok(found: list[Verdict]) -> dict[str, str]:
    return {verdict.check: verdict.seen for verdict in found if verdict.status != OK}


# ---- what is right


def test_the_template_passes() -> None:
    found = run(Push())
    assert [verdict.check for verdict in found] == [name_of(check) for check in CHECKS]
    assert not_ok(found) == {"the embodiment fits": "it has none",
                             EXPERT: "its description says that there is none"}


@pytest.mark.parametrize(("name", "skipped"), [
    ("CartPole-v1", {"initial states differ", "the embodiment fits", EXPERT}),
    ("Pendulum-v1", {"initial states differ", "the embodiment fits", EXPERT, "an ended slot stays as it was"}),
])
def test_gymnasium_passes(name: str, skipped: set[str]) -> None:
    pytest.importorskip("gymnasium")
    found = run(load(SimulatorName.parse("gymnasium:" + name)))
    assert not [verdict for verdict in found if verdict.failed]
    assert set(not_ok(found)) == skipped


def test_one_slot_is_enough() -> None:
    found = {verdict.check: verdict for verdict in run(of(World, max_envs=1), envs=4)}
    assert not [verdict for verdict in found.values() if verdict.failed]
    assert found["it repeats in another slot"].seen == "it has 1 slot here, this takes 2"


def test_who_says_that_it_is_not_deterministic_need_not_be() -> None:
    check = "it repeats after other episodes"
    assert verdicts(of(faulty.NotDeterministic, deterministic=False), check)[check].status == SKIPPED


def test_an_adapter_of_others_may_find_one_beginning() -> None:
    check = "different seeds differ"
    verdict = verdicts(faulty.OneBeginning(), check)[check]
    assert verdict.status == SKIPPED and "it has one beginning" in verdict.seen


def test_an_episode_may_end_where_it_began_if_it_came_by_there() -> None:
    check = "an ended slot stays as it was"
    verdict = verdicts(of(faulty.GoesRound), check)[check]
    assert verdict.status == OK, verdict


def test_a_body_that_fits() -> None:
    found = verdicts(with_a_body(), "the embodiment fits")["the embodiment fits"]
    assert (found.status, found.seen) == (OK, "point")


def test_an_expert_that_does_its_tasks() -> None:
    found = verdicts(faulty.with_an_expert(), EXPERT)[EXPERT]
    assert found.status == OK and found.seen.endswith(" actions in 2 tasks"), found


# ---- what is wrong

REPEATS = "the same unit and actions, but after 1 steps `state` differs by up to "


@pytest.mark.parametrize(("make", "check", "seen"), [
    (faulty.Unstable, "describe is cheap and stable", "`libraries` is {'numpy': '"),
    (lambda: faulty.TWO_TASKS_OF_ONE_NAME, "describe is cheap and stable", "two tasks are called push"),
    (lambda: faulty.BAD_BOUNDS, "describe is cheap and stable", "has 2 numbers, 1 lower and 1 upper bounds"),
    (lambda: faulty.NO_CHOICE, "describe is cheap and stable", "a discrete action has n = 0"),
    (lambda: faulty.NO_DTYPE, "describe is cheap and stable", "observation `state` has dtype float31"),
    (lambda: of(faulty.NoSecondTask), "every task resets", "task push-from-8, slot 1: reset raised KeyError"),
    (lambda: of(faulty.WrongDtype), "steps give what is described", "`state` is float64, the description says float32"),
    (lambda: of(faulty.NaNReward), "steps give what is described", "the reward is nan"),
    (lambda: of(faulty.OddSuccess), "steps give what is described", "success is 7, not -1, 0 or 1"),
    (lambda: of(faulty.ChangesWhenSeen), "looking changes nothing", "seen twice without a step between"),
    (lambda: of(faulty.NotDeterministic), "it repeats after other episodes", REPEATS),
    (lambda: of(faulty.GoesOnWithItsGenerator), "it repeats after other episodes", REPEATS),
    (lambda: of(faulty.KnowsItsSlot), "it repeats in another slot", REPEATS),
    (lambda: of(faulty.OneMoreEachSession), "it repeats in a fresh session", REPEATS),
    (lambda: of(faulty.LooksFromItsFirstBeginning), "it repeats in a fresh session", "at the reset `state` differs"),
    (lambda: of(faulty.HearsNoSeed), "different seeds differ", "seeds 0 to 4 of push give the same"),
    (lambda: of(faulty.HearsNoState), "initial states differ", "initial states 0 and 4 of push-from-8 look the same"),
    (lambda: of(faulty.FearsTheEdge), "actions at the bounds are taken", "the highest action: "),
    (lambda: of(World, expert=True), EXPERT, "task push has none, and the description says that there is one"),
    (lambda: faulty.with_an_expert(np.zeros(2)), EXPERT, "task push: it says float64, not float32"),
    (lambda: faulty.with_an_expert(np.zeros(3, np.float32)), EXPERT, "it says [1, 3] for one slot, not [1, 2]"),
    (lambda: faulty.with_an_expert(np.float32([0, 1.5])), EXPERT, "it says 1.5, which is out of bounds"),
    (lambda: faulty.with_an_expert(np.float32([0, np.nan])), EXPERT, "it says nan, which is out of bounds"),
    (lambda: with_a_body(action=(faulty.Field("push", 3),)), "the embodiment fits", "of point has 3 numbers"),
    (lambda: with_a_body(state=(faulty.Field("joints", 2),)), "the embodiment fits", "there is no `joints` among"),
    (lambda: of(faulty.ResetsItself), "an ended slot stays as it was", "with a jump to where episodes begin"),
    (lambda: of(faulty.ResetsItselfToTheSame), "an ended slot stays as it was", "the last observation of an"),
    (lambda: of(faulty.SharesState), "slots leave each other alone", "slot 1 did nothing while slot 0 was reset, but"),
    (faulty.StepsAfterItsEnd, "step after close raises", "it gave an outcome"),
    (lambda: of(faulty.GrowsMemory), "memory does not grow", " KB an episode over 36, at most 100"),
    (lambda: of(faulty.LeaksADescriptor), "nothing is left open", "40 descriptors more after 20 times open and close"),
    (lambda: of(faulty.LeaksAThread), "nothing is left open", "40 threads more after 20 times open and close"),
    (lambda: of(faulty.Prints), "nothing is printed", "such as 'hello, I am a simulator'"),
    (lambda: of(faulty.PrintsFromBelow), "nothing is printed", "such as 'hello, I am a library'"),
    (lambda: of(faulty.Asks), "nothing is asked", "stdin was read "),
    (lambda: of(faulty.AsksFromBelow), "nothing is asked", "stdin was read "),
    (lambda: of(faulty.AsksAndDoesNotMind), "nothing is asked", "stdin was read "),
    (lambda: of(faulty.FailsToClose), "every task resets", "close raised RuntimeError: the window is stuck"),
])
def test_a_fault_is_found_by_its_check(make: Callable[[], Simulator], check: str, seen: str) -> None:
    verdict = verdicts(make(), check)[check]
    assert verdict.failed, verdict
    assert seen in verdict.seen
    assert "\n" not in verdict.seen


def test_a_description_that_takes_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_episodes, "DESCRIBE_S", 0.01)
    check = "describe is cheap and stable"
    assert "more than 0.01: build nothing in it" in verdicts(faulty.Slow(), check)[check].seen


class StepsAll(faulty.EachSlot):
    """What is over begins anew with the next step of anybody, as in gymnasium's vectors unless they are told not to."""

    over: set[int] = set()

    def step(self, slots: Any, actions: Any) -> Any:
        for slot in self.over - set(slots):
            self._world(slot).reset(faulty.WorkUnit("next", "push", 77))
        outcome = super().step(slots, actions)
        self.over = {slot for slot, over in zip(slots, outcome.terminated) if over}
        return outcome


def test_a_reset_with_the_next_step_of_others_is_found() -> None:
    class Vector(Push):
        def open(self, envs: int) -> StepsAll:
            return StepsAll(World, envs)

    check = "an ended slot stays as it was"
    assert "its episode was over, and when others went on `state` differs" in verdicts(Vector(), check)[check].seen


def test_what_raises_in_a_check_is_its_failure_with_a_traceback() -> None:
    def absent() -> World:
        raise RuntimeError("no\ndisplay")

    verdict = verdicts(of(absent))["every task resets"]
    assert verdict.seen == "open(2) raised RuntimeError: no display"
    raised = verdicts(of(faulty.NoSecondTask))["every task resets"]
    assert "KeyError: 'push-from-8'" in raised.trace and "faulty.py" in raised.trace


def test_where_the_basics_fail_the_rest_is_skipped_but_not_what_was_printed() -> None:
    class Both(faulty.WrongDtype, faulty.Prints):
        pass

    found = run(of(Both))
    status = {verdict.check: verdict.status for verdict in found}
    assert [check for check, told in status.items() if told == "FAILED"] == ["steps give what is described"]
    assert status["rates"] == SKIPPED and status["nothing is asked"] == OK


def test_the_process_has_its_own_stdin_and_stdout_again() -> None:
    before = sys.stdin, sys.stdout, os.fstat(0).st_ino, os.fstat(1).st_ino
    verdicts(of(faulty.Prints), "nothing is printed")
    assert (sys.stdin, sys.stdout, os.fstat(0).st_ino, os.fstat(1).st_ino) == before


def test_checks_are_told_as_they_begin_and_end() -> None:
    told: list[str] = []
    run(of(faulty.WrongDtype), begin=told.append, end=lambda verdict: told.append(verdict.check))
    assert told[0::2] == told[1::2] == [name_of(check) for check in CHECKS]


@pytest.mark.parametrize(("sizes", "bytes_an_episode"), [
    ([100, 100, 100, 100], 0), ([100, 200, 300, 400], 20), ([100, 900, 900, 900], 0), ([100, 100, 90, 100], 0),
])
def test_memory_that_grows_once_does_not_grow(sizes: list[int], bytes_an_episode: float) -> None:
    assert growth(sizes, 5) == bytes_an_episode


def test_a_description_under_another_name_travels() -> None:
    assert replace(Push().describe(), simulator="x:y") == Bench(Push(), "x:y", 2, 50).description
