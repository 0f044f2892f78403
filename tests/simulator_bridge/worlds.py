"""A simulator of whole numbers that does wrong what a task's name says, when its episode has come to its second step.

The episode ends, with success, when the sum of its actions reaches TOP. Observation: [seed, sum of actions].
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.simulator_bridge.contract import (
    BOX,
    BY_SEED,
    DISCRETE,
    FAILURE,
    SUCCESS,
    ActionSpec,
    ArraySpec,
    Description,
    Environment,
    Simulator,
    TaskSpec,
    WorkUnit,
)
from cosmos_actor.simulator_bridge.slots import EachSlot

TOP, LIMIT = 10, 20
TROUBLES = (
    "raise in reset", "raise in step", "raise in observe", "exit in step", "panic in step", "wrong shape",
    "wrong dtype", "wrong name", "no array", "nan", "nan reward", "no reward", "ask", "print", "hang", "slow reset",
)
HANG_S, SLOW_S, SHORT_S = 60.0, 2.5, 0.15


class Panic(BaseException):
    """Some extension modules raise what is no Exception."""


class Counter(Environment):
    """Counts its own calls too, so that a test can see what was not called."""

    def __init__(self) -> None:
        self.steps = self.looks = self.resets = 0
        self.closed = False

    def reset(self, unit: WorkUnit) -> None:
        self.resets += 1
        self.unit, self.count, self.steps = unit, 0, 0
        if unit.task == "raise in reset":
            raise RuntimeError("no such kitchen")
        if unit.task == "slow reset":
            time.sleep(SLOW_S)

    def step(self, action: Any) -> tuple[float, bool, bool]:
        self.steps += 1
        self.count += int(action)
        reward = self._trouble(self.unit.task) if self.steps >= 2 else float(action)
        return reward, self.count >= TOP, False

    def _trouble(self, task: str) -> Any:
        if task == "raise in step":
            raise RuntimeError("the arm\nfell off")
        if task == "exit in step":
            sys.exit(5)
        if task == "panic in step":
            raise Panic("index out of bounds")
        if task == "ask":
            return float(input("Accept the licence? [y/n] "))
        if task == "print":
            print("\x00\x00 hello, I am a simulator")
        if task == "hang":
            print("hanging", flush=True)
            time.sleep(HANG_S)
        return {"nan reward": float("nan"), "no reward": None}.get(task, 1.0)

    def observe(self) -> dict[str, Any]:
        self.looks += 1
        seen: Any = np.array([self.unit.seed, self.count], np.float32)
        if self.steps < 2:
            return {"count": seen}
        if self.unit.task == "raise in observe":
            raise OSError("no display")
        if self.unit.task == "nan":
            seen[1] = np.nan
        wrong = {"wrong shape": seen[:1], "wrong dtype": seen.astype(np.float64), "no array": [0.0, 0.0]}
        return {"sum" if self.unit.task == "wrong name" else "count": wrong.get(self.unit.task, seen)}

    def expert(self) -> int:
        return 3 if self.count < TOP - 3 else TOP - self.count

    def success(self) -> int:
        return SUCCESS if self.count >= TOP else FAILURE

    def close(self) -> None:
        self.closed = True


class CounterSimulator(Simulator):
    def __init__(self, identity: str, world: type[Environment] = Counter) -> None:
        self.identity, self.world = identity, world

    def describe(self) -> Description:
        if self.identity == "speechless":
            raise RuntimeError("no device\nto ask")
        if self.identity == "wordless":
            return None  # type: ignore[return-value]
        return Description(
            simulator=self.identity, tasks=[TaskSpec(name, LIMIT) for name in ("count", *TROUBLES)],
            observations={"count": ArraySpec("float32", (2,))}, action=ActionSpec(DISCRETE, n=4), max_envs=8,
            expert=True)

    def open(self, envs: int) -> EachSlot:
        return EachSlot(self.world, envs)


def make(identity: str = "counter", close_file: str = "", **options: Any) -> Simulator:
    """`close_file` is written when a world is closed."""

    class Leaving(Counter):
        def close(self) -> None:
            if close_file:
                Path(close_file).write_text("closed")

    class Absent(Counter):
        def __init__(self) -> None:
            raise RuntimeError("no display\nhere")

    if identity == "absent":
        return CounterSimulator(identity, Absent)
    if options:
        raise TypeError(f"a counter has no options, got {sorted(options)}")
    return CounterSimulator(identity, Leaving)


class Slow(Counter):
    """No step of it is slow, many are."""

    def step(self, action: Any) -> tuple[float, bool, bool]:
        time.sleep(SHORT_S)
        return super().step(action)


def slow() -> Simulator:
    return CounterSimulator("slow", Slow)


def unit(task: str = "count", seed: int = 0, **more: Any) -> WorkUnit:
    return WorkUnit(f"{task} {seed}", task, seed, **more)


# ---- with pictures and an expert

class Painter(Environment):
    """A pen that is to reach the middle of a line. Two pictures, two arrays of a state, and an expert that goes there.

    Task `never` has an expert that stands still, `breaks` one that raises at its third step.
    """

    def reset(self, unit: WorkUnit) -> None:
        self.unit, self.steps = unit, 0
        rng = np.random.default_rng(unit.seed)
        self.at = float(unit.initial_state - 2 if unit.initial_state != BY_SEED else rng.uniform(-2, 2))
        self.paper = rng.integers(0, 256, (12, 16, 3), np.uint8)
        self.done: list[float] = []

    def step(self, action: Any) -> tuple[float, bool, bool]:
        self.steps += 1
        self.done.append(float(action[0]))
        self.at += 0.5 * float(action[0])
        return -abs(self.at), self.success() == SUCCESS, False

    def observe(self) -> dict[str, Any]:
        wide = np.full((8, 24, 3), self.steps, np.uint8)
        return {"wrist": self.paper + np.uint8(self.steps), "front": wide, "at": np.array([[self.at]], np.float32),
                "steps": np.array([self.steps, self.steps % 2], np.int64)}

    def expert(self) -> Any:
        if self.unit.task == "breaks" and self.steps >= 2:
            raise RuntimeError("lost\nthe pen")
        still = self.unit.task == "never"
        return np.array([0.0 if still else np.clip(-2 * self.at, -1, 1), 9.0], np.float32)

    def success(self) -> int:
        return SUCCESS if abs(self.at) < 0.1 else FAILURE


class PainterSimulator(Simulator):
    def describe(self) -> Description:
        return Description(
            simulator="painter", tasks=[
                TaskSpec("paint", LIMIT, instruction="go to  the middle"), TaskSpec("never", 5, initial_states=5),
                TaskSpec("breaks", LIMIT)],
            observations={"wrist": ArraySpec("uint8", (12, 16, 3)), "front": ArraySpec("uint8", (8, 24, 3)),
                          "at": ArraySpec("float32", (1, 1)), "steps": ArraySpec("int64", (2,))},
            action=ActionSpec(BOX, shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0)), control_hz=20.0, expert=True)

    def open(self, envs: int) -> EachSlot:
        return EachSlot(Painter, envs)


def painter() -> Simulator:
    return PainterSimulator()


class ExitsWhileItPaints(Painter):
    def step(self, action: Any) -> tuple[float, bool, bool]:
        os._exit(9)


class PainterThatExits(PainterSimulator):
    def open(self, envs: int) -> EachSlot:
        return EachSlot(ExitsWhileItPaints, envs)


def painter_that_exits() -> Simulator:
    return PainterThatExits()
