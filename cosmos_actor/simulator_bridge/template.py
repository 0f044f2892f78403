"""my_simulator: a point is pushed to a target. It has everything that a simulator has; put your own into its place."""

from typing import Any, Dict, Tuple

import numpy as np

from cosmos_actor.simulator_bridge.contract import (
    BOX, BY_SEED, FAILURE, SUCCESS, ActionSpec, ArraySpec, Description, Environment, SimSession, Simulator, TaskSpec,
    WorkUnit,
)
from cosmos_actor.simulator_bridge.slots import EachSlot

STATES = 8


class World(Environment):
    """One world. It is never stepped before a reset, nor after the end of an episode."""

    def reset(self, unit: WorkUnit) -> None:
        angle = np.random.default_rng(unit.seed).uniform(0, 2 * np.pi)
        if unit.initial_state != BY_SEED:  # one of the set, whatever the seed
            angle = 2 * np.pi * unit.initial_state / STATES
        self.at = 0.6 * np.array([np.cos(angle), np.sin(angle)])

    def step(self, action: np.ndarray) -> Tuple[float, bool, bool]:
        self.at = self.at + 0.1 * action
        away = float(np.linalg.norm(self.at))
        return -away, self.success() == SUCCESS or away > 1, False  # reward, terminated, truncated

    def observe(self) -> Dict[str, np.ndarray]:
        return {"state": self.at.astype(np.float32)}

    def success(self) -> int:
        return SUCCESS if np.linalg.norm(self.at) < 0.1 else FAILURE


class Push(Simulator):
    """As it is installed here."""

    def describe(self) -> Description:
        return Description(
            simulator="my_simulator:push",
            tasks=[TaskSpec("push", max_steps=100), TaskSpec("push-from-8", max_steps=100, initial_states=STATES)],
            observations={"state": ArraySpec("float32", (2,))},
            action=ActionSpec(BOX, shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0)))

    def open(self, envs: int) -> SimSession:
        return EachSlot(World, envs)


def make(identity: str = "push", **options: Any) -> Simulator:
    """What `my_simulator:ID?NAME=VALUE` calls, with the ID and the options."""
    if identity != "push" or options:
        raise ValueError("there is only my_simulator:push, without options")
    return Push()
