"""The simulator that `sim new` writes, with one thing wrong: a world a fault, named for it."""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import threading
import time
from dataclasses import replace
from typing import Any, Callable, Dict, List

import numpy as np

from cosmos_actor.simulator_bridge.contract import (
    BY_SEED,
    DISCRETE,
    ActionSpec,
    ArraySpec,
    Description,
    SimSession,
    Simulator,
    WorkUnit,
)
from cosmos_actor.simulator_bridge.embodiment import EmbodimentMap, Field
from cosmos_actor.simulator_bridge.slots import EachSlot
from cosmos_actor.simulator_bridge.template import Push, World

LEAKED: List[Any] = []
"""What worlds have taken and not given back; `give_back` does."""
ENDED = threading.Event()
GENERATOR = np.random.default_rng(0)


def give_back() -> None:
    ENDED.set()
    for number in LEAKED:
        if isinstance(number, int):
            os.close(number)
    LEAKED.clear()


def with_an_expert(told: Any = None) -> Simulator:
    return of(type("Told", (Expert,), {"told": told}), expert=True)


def of(world: Callable[[], World], **changes: Any) -> Simulator:
    """A simulator of such worlds; `changes` to its description."""

    class Faulty(Push):
        def describe(self) -> Description:
            return replace(super().describe(), **changes)

        def open(self, envs: int) -> SimSession:
            return EachSlot(world, envs)

    return Faulty()


class NotDeterministic(World):
    def step(self, action: Any) -> Any:
        return super().step(action + GENERATOR.normal(0, 1e-6, 2))


class GoesOnWithItsGenerator(World):
    """What it draws depends on the episodes before, in this world only."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def step(self, action: Any) -> Any:
        return super().step(action + self.rng.normal(0, 1e-6, 2))


class KnowsItsSlot(World):
    made = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.made)

    def step(self, action: Any) -> Any:
        return super().step(action * (1 + 1e-6 * (self.number % 2)))


class OneMoreEachSession(World):
    made = itertools.count()

    def __init__(self) -> None:
        self.session = next(self.made) // 2

    def step(self, action: Any) -> Any:
        return super().step(action * (1 + 1e-6 * self.session))


class ResetsItself(World):
    """To another beginning, as vector environments do."""

    def __init__(self) -> None:
        self.seeds = itertools.count(1000)

    def step(self, action: Any) -> Any:
        outcome = super().step(action)
        if outcome[1]:
            super().reset(WorkUnit("next", "push", next(self.seeds)))
        return outcome


class ResetsItselfToTheSame(World):
    def reset(self, unit: WorkUnit) -> None:
        self.unit = unit
        super().reset(unit)

    def step(self, action: Any) -> Any:
        outcome = super().step(action)
        if outcome[1]:
            super().reset(self.unit)
        return outcome


class WrongDtype(World):
    def observe(self) -> Dict[str, np.ndarray]:
        return {"state": self.at}


class NaNReward(World):
    def step(self, action: Any) -> Any:
        return (float("nan"), *super().step(action)[1:])


class OddSuccess(World):
    def success(self) -> int:
        return 7


class LeaksADescriptor(World):
    def __init__(self) -> None:
        LEAKED.append(os.open(os.devnull, os.O_RDONLY))


class LeaksAThread(World):
    def __init__(self) -> None:
        ENDED.clear()
        threading.Thread(target=ENDED.wait, daemon=True).start()


class GrowsMemory(World):
    def reset(self, unit: WorkUnit) -> None:
        pages = mmap.mmap(-1, 1 << 19)  # of its own: the heap may have room that others have left
        pages.write(b"x" * (1 << 19))
        LEAKED.append(pages)
        super().reset(unit)


class SharesState(World):
    shared: Dict[str, Any] = {}

    @property
    def at(self) -> Any:
        return self.shared["at"]

    @at.setter
    def at(self, value: Any) -> None:
        self.shared["at"] = value


class Prints(World):
    def step(self, action: Any) -> Any:
        print("hello, I am a simulator")
        return super().step(action)


class PrintsFromBelow(World):
    """As compiled code does."""

    def step(self, action: Any) -> Any:
        os.write(1, b"hello, I am a library\n")
        return super().step(action)


class Asks(World):
    def step(self, action: Any) -> Any:
        input("Accept the licence? [y/n] ")
        return super().step(action)


class AsksFromBelow(World):
    def step(self, action: Any) -> Any:
        os.read(0, 1)
        return super().step(action)


class AsksAndDoesNotMind(World):
    def step(self, action: Any) -> Any:
        sys.stdin.readline()
        return super().step(action)


class LooksFromItsFirstBeginning(World):
    """Its camera stands where things were when it was made."""

    at_first: Any = None

    def reset(self, unit: WorkUnit) -> None:
        super().reset(unit)
        self.at_first = self.at if self.at_first is None else self.at_first

    def observe(self) -> Dict[str, np.ndarray]:
        return {"state": (self.at - self.at_first).astype(np.float32)}


class HearsNoSeed(World):
    def reset(self, unit: WorkUnit) -> None:
        super().reset(replace(unit, seed=0))


class OneBeginning(Push):
    """As an adapter of others' worlds may find them."""

    seeds_may_be_alike = True

    def open(self, envs: int) -> SimSession:
        return EachSlot(HearsNoSeed, envs)


class GoesRound(World):
    """Its track is a circle, and an episode is over where it has begun, by its rules."""

    def reset(self, unit: WorkUnit) -> None:
        self.first: Dict[str, np.ndarray] = {}
        self.count = 0
        super().reset(unit)
        self.first = super().observe()

    def step(self, action: Any) -> Any:
        reward, _, _ = super().step(action)
        self.count += 1
        return reward, self.count == 9, False

    def observe(self) -> Dict[str, np.ndarray]:
        return self.first if self.first and self.count % 3 == 0 else super().observe()


class Expert(World):
    """`told`: what it says instead of the right thing."""

    told: Any = None

    def expert(self) -> Any:
        return np.clip(-10 * self.at, -1, 1).astype(np.float32) if self.told is None else self.told


class HearsNoState(World):
    def reset(self, unit: WorkUnit) -> None:
        super().reset(replace(unit, initial_state=BY_SEED, seed=unit.seed % 4))


class ChangesWhenSeen(World):
    def observe(self) -> Dict[str, np.ndarray]:
        self.at = self.at + 1e-4
        return super().observe()


class FearsTheEdge(World):
    def step(self, action: Any) -> Any:
        if action.max() >= 1:
            raise ValueError("the arm is at its limit")
        return super().step(action)


class NoSecondTask(World):
    def reset(self, unit: WorkUnit) -> None:
        if unit.initial_state != BY_SEED:
            raise KeyError(unit.task)
        super().reset(unit)


class Unstable(Push):
    calls = itertools.count()

    def describe(self) -> Description:
        return replace(super().describe(), libraries={"numpy": str(next(self.calls))})


class Slow(Push):
    def describe(self) -> Description:
        time.sleep(0.02)
        return super().describe()


class Ghost(EachSlot):
    """Is never closed."""

    def close(self) -> None:
        pass


class StepsAfterItsEnd(Push):
    def open(self, envs: int) -> SimSession:
        return Ghost(World, envs)


class FailsToClose(World):
    def close(self) -> None:
        raise RuntimeError("the window is stuck")


def with_a_body(**changes: Any) -> Simulator:
    simulator = Push()
    fits: Dict[str, Any] = {"name": "point", "state": (Field("state", 2),), "action": (Field("push", 2),)}
    simulator.embodiment = EmbodimentMap(**{**fits, **changes})
    return simulator


TWO_TASKS_OF_ONE_NAME = of(World, tasks=[Push().describe().tasks[0]] * 2)
BAD_BOUNDS = of(World, action=ActionSpec("box", shape=(2,), low=(0.0,), high=(1.0,)))
NO_CHOICE = of(World, action=ActionSpec(DISCRETE))
NO_DTYPE = of(World, observations={"state": ArraySpec("float31", (2,))})
