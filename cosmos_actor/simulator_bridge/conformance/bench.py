"""What a check works with: sessions of the simulator, units, actions, and what was seen while an episode was played.

Legend: n slots of a call, T steps, K actions of a chunk.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

import numpy as np

from cosmos_actor.simulator_bridge.attach import described
from cosmos_actor.simulator_bridge.checked import CheckedSession
from cosmos_actor.simulator_bridge.checks import copied_observations, parsed_specs
from cosmos_actor.simulator_bridge.contract import (
    BY_SEED,
    DISCRETE,
    ActionSpec,
    Description,
    SimSession,
    Simulator,
    SimulatorError,
    TaskSpec,
    WorkUnit,
)
from cosmos_actor.simulator_bridge.messages import Assignment, Reset, Step, Stepped
from cosmos_actor.simulator_bridge.mistakes import one_line
from cosmos_actor.simulator_bridge.slots import ENDS

from .stdio import Stdio

UNBOUNDED = 1.0
"""Actions without bounds are drawn from a normal distribution of this spread."""
HELD_STEPS = 4
"""Steps in which a drawn action stays the same: what changes at each step goes nowhere, and no episode would end."""

Seen = Dict[str, np.ndarray]


class Failed(Exception):
    """A promise of the contract that is not kept. `str()` of it is what was seen."""

    kind = ""
    """Of `contract.KINDS`, where `CheckedSession` has said so."""


class Skipped(Exception):
    """The check has nothing to look at here. `str()` of it is the reason."""


class Moment(NamedTuple):
    """One slot after a reset or a step."""

    observations: Seen
    """Name -> [...], without the slot's dimension."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: int = -1

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


class Bench:
    """One simulator under test."""

    def __init__(self, simulator: Simulator, name: str, envs: int, steps: int) -> None:
        self.simulator, self.steps, self.stdio = simulator, steps, Stdio()
        self._name, self._envs = name, envs
        self._description: Optional[Description] = None
        self.not_as_described = ""
        """What the resets have shown and is for another check to tell."""

    @property
    def description(self) -> Description:
        if self._description is None:
            name = self._name or self.simulator.describe().simulator
            self._description = described(self.simulator, name, 1)
        return self._description

    @property
    def envs(self) -> int:
        """Slots of a session: as many as were asked for, if it can have them."""
        return max(1, min(self._envs, self.description.max_envs))

    def need_determinism(self) -> None:
        """Raises Skipped."""
        if not self.description.deterministic:
            raise Skipped("its description does not say deterministic")

    def need_slots(self, n: int) -> None:
        """Raises Skipped."""
        if self.envs < n:
            raise Skipped("it has {} slot{} here, this takes {}".format(self.envs, "s" * (self.envs != 1), n))

    @contextmanager
    def session(self) -> Iterator[Player]:
        """A fresh session, closed at the end. Raises Failed where opening or closing raises."""
        try:
            session = self.simulator.open(self.envs)
        except ENDS:
            raise
        except BaseException as error:
            raise Failed("open({}) raised {}".format(self.envs, one_line(error))) from error
        try:
            yield Player(session, self.description, self.envs)
        except BaseException:
            close_quietly(session)
            raise
        try:
            session.close()
        except Exception as error:
            raise Failed("close raised {}".format(one_line(error))) from error

    def unit(self, index: int, task: Optional[TaskSpec] = None, max_steps: int = 0) -> WorkUnit:
        """The one with this seed, or this initial state, of `task` (the first one, if none is named)."""
        task = task or self.description.tasks[0]
        state = index % task.initial_states if task.initial_states else BY_SEED
        return WorkUnit("{} {}".format(task.name, index), task.name, index, state, max_steps)

    def actions(self, steps: int, seed: int = 0) -> np.ndarray:
        """[T, ...] of random actions for one slot, each of them held for a few steps."""
        drawn = random_actions(self.description.action, -(-steps // HELD_STEPS), np.random.default_rng(seed))
        return np.repeat(drawn, HELD_STEPS, axis=0)[:steps]


class Player:
    """Plays episodes in a session. Whatever `CheckedSession` calls a failure raises Failed with its line."""

    def __init__(self, session: SimSession, description: Description, envs: int) -> None:
        self.raw, self.envs = session, envs
        self._description = description
        self._checked = CheckedSession(session, description, envs)
        self._number = 0

    def reset(self, units: Dict[int, WorkUnit]) -> Dict[int, Moment]:
        """Slot -> what is seen first."""
        stepped = self.answer(Reset(self._next(), [Assignment(slot, unit) for slot, unit in units.items()]))
        return moments(stepped)

    def chunk(self, slots: Sequence[int], actions: np.ndarray) -> Stepped:
        """`actions` [n, K, ...]."""
        return self.answer(Step(self._next(), actions, np.array(slots, np.int32)))

    def step(self, slots: Sequence[int], actions: np.ndarray) -> Dict[int, Moment]:
        """`actions` [n, ...]; slot -> what became of it."""
        return moments(self.chunk(slots, actions[:, None]))

    def answer(self, request: Any) -> Stepped:
        stepped = self._checked.answer(request)
        if stepped.failures:
            failure = Failed(stepped.failures[0].text)
            failure.kind = stepped.failures[0].kind
            raise failure
        return stepped

    def look(self, slot: int) -> Seen:
        """What the session itself shows, also of a slot whose episode is over."""
        try:
            seen = copied_observations(self.raw.observe([slot]), parsed_specs(self._description), 1)
        except SimulatorError as error:
            raise Failed("observe of slot {}: {}".format(slot, error.text)) from error
        return {name: array[0] for name, array in seen.items()}

    def play(self, units: Dict[int, WorkUnit], actions: np.ndarray) -> Dict[int, List[Moment]]:
        """`actions` [T, ...], the same for all slots. Slot -> its moments, until the end of episode or actions."""
        played = {slot: [moment] for slot, moment in self.reset(units).items()}
        running = list(units)
        for action in actions:
            if not running:
                break
            for slot, moment in self.step(running, np.stack([action] * len(running))).items():
                played[slot].append(moment)
            running = [slot for slot in running if not played[slot][-1].over]
        return played

    def _next(self) -> int:
        self._number += 1
        return self._number


def moments(stepped: Stepped) -> Dict[int, Moment]:
    """Slot -> what became of it, of an answer to a reset or to one action."""
    rewards = stepped.rewards.sum(axis=1)
    return {int(slot): Moment({name: array[row] for name, array in stepped.observations.items()}, float(rewards[row]),
                              bool(stepped.terminated[row]), bool(stepped.truncated[row]), int(stepped.success[row]))
            for row, slot in enumerate(stepped.slots)}


def random_actions(spec: ActionSpec, n: int, rng: np.random.Generator) -> np.ndarray:
    """[n, ...] that the spec allows."""
    if spec.kind == DISCRETE:
        return rng.integers(0, spec.n, n)
    low, high = bounds(spec)
    drawn = rng.normal(0.0, UNBOUNDED, (n, *spec.shape))
    between = np.isfinite(low) & np.isfinite(high)
    spread = np.where(between, high, 1.0) - np.where(between, low, 0.0)
    within = np.where(between, low, 0.0) + rng.random((n, *spec.shape)) * spread
    return np.clip(np.where(between, within, drawn), low, high).astype(np.float32)


def bounds(spec: ActionSpec) -> Any:
    """(low, high) of a box, each of its shape; infinite where there is none."""
    size = int(np.prod(spec.shape))
    return (np.asarray(spec.low or [-np.inf] * size, np.float64).reshape(spec.shape),
            np.asarray(spec.high or [np.inf] * size, np.float64).reshape(spec.shape))


def difference(one: Seen, other: Seen) -> str:
    """How two observations differ, byte for byte; empty if they do not."""
    for name, array in one.items():
        if array.tobytes() != other[name].tobytes():
            apart = np.abs(array.astype(np.float64) - other[name].astype(np.float64)).max()
            return "`{}` differs by up to {:.3g}".format(name, apart)
    return ""


def trace_difference(one: Sequence[Moment], other: Sequence[Moment]) -> str:
    """Where two ways to play an episode part, and by what; empty if they are the same."""
    for step, (first, second) in enumerate(zip(one, other)):
        after = "after {} steps ".format(step) if step else "at the reset "
        apart = difference(first.observations, second.observations)
        if apart:
            return after + apart
        for name in ("reward", "terminated", "truncated", "success"):
            if getattr(first, name) != getattr(second, name):
                return "{}`{}` is {} and then {}".format(after, name, getattr(first, name), getattr(second, name))
    return ""


def close_quietly(session: SimSession) -> None:
    """When what is wrong with it is known already."""
    try:
        session.close()
    except Exception:  # noqa: S110 (told by nobody, since another failure is)
        pass


