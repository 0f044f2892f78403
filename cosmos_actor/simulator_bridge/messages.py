"""What a simulator and its driver say to each other. The simulator dials; from then on the driver asks.

    simulator ── Attach ──────────────> driver        Attached, or refused with a line
    simulator <── Reset, Step ───────── driver        Stepped
    simulator ── Detach ──────────────> driver        it leaves; its slots get no new work

Legend: E slots of the session, n slots of a request, K actions of a chunk, m slots that began anew in the reply.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List

from cosmos_actor.bus.schema import Array, Json, array, schema

from .contract import Description, WorkUnit

DRIVER = "rollout"
"""The role that drives simulators."""
SIMULATOR = "simulator"
"""The role of a simulator's process, and of its key."""


SLOT, STEPS, TERMINATED, TRUNCATED, SUCCEEDED = range(5)
"""Columns of `Stepped.rows`."""


@schema("sim_attach", version=2)
@dataclass(frozen=True)
class Attach:
    """A simulator offers itself."""

    session: str
    """Random, the same as long as its worlds stay open: by it a simulator that was cut off gets its slots back."""
    envs: int
    description: Description
    embodiment: Json = None
    """`EmbodimentMap.plain()`, for the line that says how two differ."""
    host: str = ""
    pid: int = 0
    python: str = ""
    life: str = ""
    """Which life of which child of the run's supervisor it is; empty when somebody else started it."""
    steps: Json = None
    """`ServedSteps.offer()`, to a driver of this host."""


@schema("sim_attached", version=3)
@dataclass(frozen=True)
class Attached:
    """The driver takes it."""

    driver: str
    resumed: bool
    """Its slots are as they were: what they were doing goes on."""
    deadline_s: float = 0.0
    """A process whose calls of the simulator take longer ends itself, with the stacks of all threads in its log; 0:
    never."""
    steps: Json = None
    """`AskedSteps.offer()`, if there is one."""
    squeeze: str = "none"
    """How pictures are to be made smaller on their way to another host: see `squeezed`."""


@schema("sim_detach", version=1)
@dataclass(frozen=True)
class Detach:
    reason: str


@schema("sim_assignment", version=1)
@dataclass(frozen=True)
class Assignment:
    """A unit for a slot."""

    slot: int
    unit: WorkUnit


@schema("sim_reset", version=1)
@dataclass(frozen=True)
class Reset:
    """Begin these units now. Answered by Stepped without rewards."""

    number: int
    """Counts requests of one session; the answer to a number is given again, not made again."""
    assignments: List[Assignment]
    queue: List[Assignment] = field(default_factory=list)
    """What each of these slots begins by itself when its episode ends; replaces what was queued for it before. A slot
    that is reset, or fails, has nothing queued from before."""


@schema("sim_step", version=1)
@dataclass(frozen=True)
class Step:
    """A chunk of K actions for each of n slots. A slot stops early where its episode ends."""

    number: int
    actions: Array = array("any")
    """[n, K, …]"""
    slots: Array = array("int32", "n", optional=True)
    """None: every slot of the session."""
    queue: List[Assignment] = field(default_factory=list)
    intermediate: bool = False
    """Also send what was seen after each action but the last; otherwise nothing is rendered there."""


@schema("sim_slot_failure", version=1)
@dataclass(frozen=True)
class SlotFailure:
    """This slot's attempt came to nothing; the slot is idle and can be reset."""

    slot: int
    kind: str
    """Of `contract.KINDS`."""
    text: str


@schema("sim_stepped", version=1)
@dataclass(frozen=True)
class Stepped:
    """What the n slots of the request see and got, in its order, without the slots that failed before the chunk's end.

    A slot whose episode ended and whose queued unit could not begin is in `slots`, in `ended` and in `failures`.
    """

    number: int
    observations: Dict[str, Array] = array("any")
    """Name -> [n, …]: where the next action is to be chosen. Of a slot that began a queued unit: that one's first."""
    rewards: Array = array("float32", "n", "K")
    """K = 0 in the answer to a reset; zero after the end of an episode."""
    rows: Array = array("int32", "n", 5)
    """Slot, actions that were executed, terminated, truncated, success. One array: each costs a world's step or two."""
    final_observations: Dict[str, Array] = array("any")
    """Name -> [m, …]: the last of the episodes that ended, in the order of `ended`; nothing where none did."""
    intermediate: Dict[str, Array] = array("any")
    """Name -> [n, K-1, …] if asked for, zero from a slot's last action on; empty otherwise."""
    failures: List[SlotFailure] = field(default_factory=list)
    """A slot that is in `ended` too: its episode counts, and it is the unit queued for it that could not begin."""
    seconds: float = 0.0
    """Time that the simulator computed."""

    @property
    def slots(self) -> Array:
        """[n]"""
        return self.rows[:, SLOT]

    @property
    def steps(self) -> Array:
        """[n]"""
        return self.rows[:, STEPS]

    @property
    def terminated(self) -> Array:
        """[n] of 0 and 1"""
        return self.rows[:, TERMINATED]

    @property
    def truncated(self) -> Array:
        """[n] of 0 and 1"""
        return self.rows[:, TRUNCATED]

    @property
    def success(self) -> Array:
        """[n] of contract.UNKNOWN, FAILURE, SUCCESS"""
        return self.rows[:, SUCCEEDED]

    @property
    def ended(self) -> Array:
        """[m]: slots whose episode ended, in the order of `slots`."""
        if self.observations and not self.final_observations:
            return self.rows[:0, SLOT]
        return self.slots[(self.terminated | self.truncated) != 0]
