"""What is asked and told where simulators give the experience. Imports neither torch nor a model."""

from __future__ import annotations

from dataclasses import dataclass

from cosmos_actor.actors.fragment import CollectTask, Fragment
from cosmos_actor.bus.schema import Array, Json, array, schema
from cosmos_actor.roles.messages import Column
from cosmos_actor.simulator_bridge.contract import Description, WorkUnit

DESCRIPTION_TOPIC = "simulator_description"
"""What the run's simulators are: rollouts follow it."""


@schema("describe_request", version=1)
@dataclass(frozen=True)
class DescribeRequest:
    """Asks a rollout what its simulators are; answered when the first has attached."""

    deadline_s: float


@schema("prepare_request", version=1)
@dataclass(frozen=True)
class PrepareRequest:
    """Make the network for these simulators: what the last RestoreRequest named, or a fresh one."""

    epoch: int
    description: Description


@schema("prepared", version=1)
@dataclass(frozen=True)
class Prepared:
    step: int
    parameters: int


@schema("collect_request", version=1)
@dataclass(frozen=True)
class CollectRequest:
    """Fragments to collect with weights of `min_ordinal` or newer."""

    tasks: list[CollectTask]
    version_dispatch: int
    min_ordinal: int
    weights_deadline_s: float


@schema("evaluate_request", version=1)
@dataclass(frozen=True)
class EvaluateRequest:
    """Units to run to their ends, greedily, with weights of `min_ordinal` or newer."""

    units: list[WorkUnit]
    version: int
    min_ordinal: int
    weights_deadline_s: float


@schema("evaluated", version=2)
@dataclass(frozen=True)
class Evaluated:
    """A record for each unit, in its order: see `roles.evaluator`."""

    records: Json
    seconds: float
    videos: dict[str, Array] = array("uint8")
    """Unit -> an MP4 file, of those that were filmed: see `roles.films`."""


@schema("judge_request", version=1)
@dataclass(frozen=True)
class JudgeRequest:
    """Asks the critic what the states of these fragments are worth, and what follows their boundaries."""

    epoch: int
    fragments: list[Fragment]


@schema("judged", version=1)
@dataclass(frozen=True)
class Judged:
    """In the order of the request: the columns `values` and `bootstrap`, and who wrote them."""

    values: list[Column]
    bootstrap: list[Column]
    writer: str


@schema("shown_request", version=1)
@dataclass(frozen=True)
class ShownRequest:
    """Asks for the demonstrated moments of one step of cloning; the same whenever it is asked."""

    step: int
    count: int
    description: Description
    """Of the run's simulators, which the demonstrations have to be of."""


@schema("shown", version=1)
@dataclass(frozen=True)
class ShownMoments:
    """n moments of demonstrations, and the K actions that came next."""

    observations: dict[str, Array] = array("any")
    """Name -> [n, …]"""
    actions: Array = array("any")
    """[n, K, …]"""
    mask: Array = array("uint8", "n", "K")
    """0 after the end of the episode."""


@schema("clone_request", version=1)
@dataclass(frozen=True)
class CloneRequest:
    """Step number `step` of the optimiser, on demonstrations. Asked twice, it is done once."""

    epoch: int
    step: int
    shown: ShownMoments


@schema("simulator_event", version=1)
@dataclass(frozen=True)
class SimulatorEvent:
    """Something about a simulator that a person should be able to read: attached, gone, refused, failed."""

    what: str
    facts: Json
