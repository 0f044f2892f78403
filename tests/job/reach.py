"""A simulator of one axis, for jobs: go to the middle. Misbehaves where its ID says so."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from cosmos_actor.simulator_bridge.contract import (
    DISCRETE,
    FAILURE,
    SUCCESS,
    ActionSpec,
    ArraySpec,
    Description,
    Environment,
    SimSession,
    Simulator,
    TaskSpec,
    WorkUnit,
)
from cosmos_actor.simulator_bridge.slots import EachSlot

NEAR = 0.06
LEAKED: list[np.ndarray] = []


class Reach(Environment):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def reset(self, unit: WorkUnit) -> None:
        self.at = np.random.default_rng(unit.seed).uniform(-1, 1, 1).astype(np.float32)
        self.broken = bool(self.fault) and unit.attempt == 0 and unit.seed % 7 == 0

    def step(self, action: Any) -> tuple[float, bool, bool]:
        if self.broken:
            self.break_down()
        self.at = np.clip(self.at + (0.1 if action else -0.1), -1.5, 1.5).astype(np.float32)
        return float(-abs(self.at[0])), bool(abs(self.at[0]) < NEAR), False

    def observe(self) -> dict[str, np.ndarray]:
        if self.broken and self.fault == "nan":
            return {"state": np.array([np.nan], np.float32)}
        if self.broken and self.fault == "shape":
            return {"state": np.zeros(2, np.float32)}
        return {"state": self.at}

    def success(self) -> int:
        return SUCCESS if abs(self.at[0]) < NEAR else FAILURE

    def break_down(self) -> None:
        if self.fault == "raise":
            raise RuntimeError("the arm is\nout of reach")
        if self.fault == "ask":
            input("Do you accept the licence? ")
        if self.fault == "print":
            print("a line on stdout", flush=True)
        if self.fault == "exit":
            os._exit(9)
        if self.fault == "hang":
            time.sleep(3600)
        if self.fault == "leak":
            LEAKED.append(np.ones(8 << 17))  # 8 MiB: on a quick machine 50 in each step left no time for any work


class ReachSimulator(Simulator):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def describe(self) -> Description:
        return Description("", [TaskSpec("reach", 40)], {"state": ArraySpec("float32", (1,))},
                           ActionSpec(DISCRETE, n=2))

    def open(self, envs: int) -> SimSession:
        return EachSlot(lambda: Reach(self.fault), envs)


def make(identity: str = "", **options: Any) -> Simulator:
    if identity == "unimportable":
        raise ImportError("libGL.so.1: cannot open shared object file")
    return ReachSimulator(identity)
