"""A simulator of two axes that is seen in a picture: go to the red or to the blue spot, as the instruction says."""

from __future__ import annotations

from typing import Any

import numpy as np

from cosmos_actor.simulator_bridge.contract import (
    BOX,
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

SIDE, NEAR, STEP = 16, 0.15, 0.2
COLOURS = {"red": 0, "blue": 2}


class Paint(Environment):
    def reset(self, unit: WorkUnit) -> None:
        draw = np.random.default_rng([unit.seed, 1])
        self.task = unit.task
        self.at = draw.uniform(-0.9, 0.9, 2)
        self.spots = {name: draw.uniform(-0.8, 0.8, 2) for name in COLOURS}

    def step(self, action: np.ndarray) -> tuple[float, bool, bool]:
        self.at = np.clip(self.at + STEP * np.clip(action, -1, 1), -1, 1)
        return float(self.success() == SUCCESS), self.success() == SUCCESS, False

    def observe(self) -> dict[str, np.ndarray]:
        image = np.zeros((SIDE, SIDE, 3), np.uint8)
        for name, channel in COLOURS.items():
            row, column = ((self.spots[name] + 1) / 2 * (SIDE - 2)).astype(int)
            image[row:row + 2, column:column + 2, channel] = 255
        row, column = ((self.at + 1) / 2 * (SIDE - 2)).astype(int)
        image[row:row + 2, column:column + 2, 1] = 255
        return {"image": image, "state": self.at.astype(np.float32)}

    def expert(self) -> np.ndarray:
        return np.clip((self.spots[self.task] - self.at) / STEP, -1, 1).astype(np.float32)

    def success(self) -> int:
        return SUCCESS if np.abs(self.spots[self.task] - self.at).max() < NEAR else FAILURE


class PaintSimulator(Simulator):
    def describe(self) -> Description:
        return Description(
            "", [TaskSpec(name, 20, instruction=f"go to the {name} spot") for name in COLOURS],
            {"image": ArraySpec("uint8", (SIDE, SIDE, 3)), "state": ArraySpec("float32", (2,))},
            ActionSpec(BOX, shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0)), control_hz=10.0, expert=True)

    def open(self, envs: int) -> SimSession:
        return EachSlot(Paint, envs)


def make(identity: str = "", **options: Any) -> Simulator:
    return PaintSimulator()
