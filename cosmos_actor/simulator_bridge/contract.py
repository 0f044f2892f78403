"""What a simulator is. Its author writes an `Environment` (one world) or a `SimSession` (many that step together).

    Simulator.describe() ──> Description          what this installation can do, before anything is built
    Simulator.open(envs) ──> SimSession           `envs` slots
        reset(slots, units) · step(slots, actions) · observe(slots) · expert(slots) · close()

Legend
    E  slots of a session          n  slots of one call, n <= E          K  actions of a chunk

Rules
- A slot is idle until it is reset. After a step that says `terminated` or `truncated` it is idle again: a session never
  resets a slot by itself.
- `observe` gives what is seen now, also of a slot whose episode has just ended. It is asked for only when somebody uses
  the answer, so rendering belongs there and not into `step`.
- Same unit and same actions, same observations, where the description says `deterministic`.
- All calls come from the main thread of the simulator's process, one at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from cosmos_actor.bus.schema import schema

DISCRETE, BOX = "discrete", "box"
UNKNOWN, FAILURE, SUCCESS = -1, 0, 1
"""What an episode says about its task; UNKNOWN where the simulator has no such notion."""
BY_SEED = -1
"""`WorkUnit.initial_state` of a task whose beginning the seed decides."""


class SimulatorError(Exception):
    """A simulator broke its contract. `kind` is one of `KINDS`; it is never a reward."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


KINDS = {
    "reset": "the simulator raised in reset",
    "step": "the simulator raised in step",
    "observe": "the simulator raised in observe",
    "shape": "an observation or a reward has another shape or dtype than the description says",
    "not_finite": "an observation or a reward is NaN or infinite",
    "hang": "no answer within the deadline",
    "lost": "the simulator's process or its link is gone",
}
"""Why an attempt at a work unit came to nothing."""


@schema("array_spec", version=1)
@dataclass(frozen=True)
class ArraySpec:
    """One array of an observation, without the slot's dimension."""

    dtype: str
    shape: Tuple[int, ...]
    finite: bool = True
    """Whether NaN and infinities are errors; false for a simulator that says "nothing there" by them."""


@schema("action_spec", version=1)
@dataclass(frozen=True)
class ActionSpec:
    """What one action is: an int64 in [0, n) (`discrete`), or float32 of `shape` within [low, high] (`box`)."""

    kind: str
    n: int = 0
    shape: Tuple[int, ...] = ()
    low: Tuple[float, ...] = ()
    """One bound for each element, flattened; empty: none."""
    high: Tuple[float, ...] = ()

    @property
    def dtype(self) -> str:
        return "int64" if self.kind == DISCRETE else "float32"


@schema("task_spec", version=1)
@dataclass(frozen=True)
class TaskSpec:
    """One task of a simulator."""

    name: str
    max_steps: int
    """Steps after which an episode is truncated; 0: only the task's own rules end it."""
    initial_states: int = 0
    """Size of its set of initial states; 0: the seed decides."""
    instruction: str = ""
    """What a language-conditioned policy is told."""


@schema("simulator_description", version=1)
@dataclass(frozen=True)
class Description:
    """What an installation of a simulator can do. The same on every host for one KIND:ID, or it is refused."""

    simulator: str
    """KIND:ID, such as gymnasium:CartPole-v1."""
    tasks: List[TaskSpec]
    observations: Dict[str, ArraySpec]
    action: ActionSpec
    max_envs: int = 64
    deterministic: bool = True
    control_hz: float = 0.0
    """Actions a second of simulated time; 0: it has no such notion."""
    embodiment: str = ""
    """`EmbodimentMap.digest`, or empty for a simulator that is nobody's body."""
    libraries: Dict[str, str] = field(default_factory=dict)
    """Distribution -> version, for whoever compares two hosts."""
    expert: bool = False
    """Whether `expert` says how its tasks are done, for demonstrations."""

    def task(self, name: str) -> TaskSpec:
        """Raises SimulatorError naming the tasks there are."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise SimulatorError("reset", "{} has no task `{}`; it has {}".format(
            self.simulator, name, ", ".join(task.name for task in self.tasks)))


@schema("work_unit", version=1)
@dataclass(frozen=True)
class WorkUnit:
    """One episode to run: a task × an initial state or seed × a budget of steps, and which try this is."""

    unit_id: str
    task: str
    seed: int
    initial_state: int = BY_SEED
    max_steps: int = 0
    """Truncated after so many steps; 0: the task's own number."""
    attempt: int = 0
    """Counts tries that ended with an error of a simulator, from 0."""


class Outcome(NamedTuple):
    """What one step of n slots did."""

    rewards: np.ndarray
    """[n] float32"""
    terminated: np.ndarray
    """[n] bool: the episode is over by the task's own rules."""
    truncated: np.ndarray
    """[n] bool: it is cut off; the value of what comes after is not zero."""
    success: Optional[np.ndarray] = None
    """[n] int8 of UNKNOWN, FAILURE, SUCCESS; None: unknown for all. Counts where an episode ends."""


class SlotErrors(Exception):
    """What a session raises that can tell whose fault it was: the other slots of the call did what they were asked."""

    def __init__(self, errors: Dict[int, BaseException], outcome: Optional[Outcome] = None) -> None:
        """`errors`: slot -> what it raised. `outcome`: of a step, for all slots of the call, with anything in the
        places of these."""
        super().__init__("; ".join("slot {}: {!r}".format(slot, error) for slot, error in errors.items()))
        self.errors, self.outcome = errors, outcome


class NoExpert(Exception):
    """Nobody has written down how this task is done."""

    def __init__(self) -> None:
        super().__init__("this simulator has no scripted expert")


class SimSession(ABC):
    """`envs` slots of one simulator. May raise anything: it is caught, typed, and charged to the slots of the call.

    A session that raises `SlotErrors` costs only those slots their episodes.
    """

    @abstractmethod
    def reset(self, slots: Sequence[int], units: Sequence[WorkUnit]) -> None:
        """Begin `units[i]` in `slots[i]`, whatever the slot was doing."""

    @abstractmethod
    def step(self, slots: Sequence[int], actions: np.ndarray) -> Outcome:
        """One action [n, …] for each of `slots`, none of which is idle."""

    @abstractmethod
    def observe(self, slots: Sequence[int]) -> Dict[str, np.ndarray]:
        """Name -> [n, …], as described. May be memory that the next call overwrites."""

    def expert(self, slots: Sequence[int]) -> np.ndarray:
        """[n, …]: what a scripted expert would do now in each of `slots`, none of which is idle. Raises NoExpert.

        Asked once before each action of a demonstration, so it may go through phases; a reset begins them anew.
        """
        raise NoExpert

    def close(self) -> None:  # noqa: B027 (most have nothing to let go of)
        """Let go of windows, contexts and processes."""


class Simulator(ABC):
    """A simulator as it is installed here."""

    embodiment: Any = None
    """Its `EmbodimentMap`, if it is somebody's body."""
    seeds_may_be_alike: bool = False
    """Of an adapter of others' worlds, which hands seeds on: some have one beginning, whatever they are told. Nowhere
    else is it right that every seed gives the same episode."""

    @abstractmethod
    def describe(self) -> Description:
        """Cheap: called before any world is built."""

    @abstractmethod
    def open(self, envs: int) -> SimSession:
        """A session of `envs` slots."""


class Environment(ABC):
    """One world. `EachSlot` makes a session of several."""

    @abstractmethod
    def reset(self, unit: WorkUnit) -> None: ...

    @abstractmethod
    def step(self, action: Any) -> Tuple[float, bool, bool]:
        """(reward, terminated, truncated). `action` is an int for a discrete spec, else float32 of the spec's shape."""

    @abstractmethod
    def observe(self) -> Dict[str, np.ndarray]:
        """Name -> array as described, without the slot's dimension."""

    def expert(self) -> Any:
        """The action that a scripted expert would take now: see `SimSession.expert`. Raises NoExpert."""
        raise NoExpert

    def success(self) -> int:
        """Of the episode so far: UNKNOWN, FAILURE or SUCCESS."""
        return UNKNOWN

    def close(self) -> None:  # noqa: B027
        """Let go of what this world holds."""
