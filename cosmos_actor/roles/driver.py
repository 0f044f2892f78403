"""What collects a job's fragments from its simulators: `sim.driver` names who makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from cosmos_actor.actors.fragment import CollectTask


@runtime_checkable
class Driver(Protocol):
    """The built-in one is `roles/collector.py`; a plug-in is called with what its class is: subclass it, or wrap it.

    One instance drives all simulators of one rollout, on the loop of its bus, for the rollout's whole life; simulators
    come and go meanwhile. Calls of `collect` overlap where steps are asked for ahead (`run.max_staleness`); none is
    under way from `interrupt` to the end of the evaluation that follows.
    """

    async def collect(self, tasks: Sequence[CollectTask]) -> list[dict[str, Any]]:
        """One dict for each task, in the order of the tasks:

        | key | |
        |---|---|
        | `columns` | those of a Fragment that rollouts fill, `task.steps` steps long: see `Cohort.columns` |
        | `episodes` | records of episodes that ended well and are in no earlier answer; `step` is added to them later |
        | `env_steps` | actions that were executed in it |
        | `simulator`, `actor` | KIND:ID, and the name of who ran it |

        A record is a line of episodes.jsonl: unit (no two episodes of a run have the same), task, seed, initial_state,
        attempt, return, length, terminated, success, simulator, actor. An attempt that failed is in none.
        Waits for simulators as long as it takes: the deadline is the caller's, who cancels. A call that is cancelled
        or raises leaves nothing running, gives back what it leased, and the next call works; what it had collected is
        lost, but not the episodes that ended in it, which the next answer reports.
        Raises SimulatorsFail when a person has to look at the simulators: that ends the job.
        """
        ...

    def interrupt(self) -> None:
        """Somebody else uses the slots next, for an evaluation: what is in the middle of an episode begins it anew in
        the next `collect`. Returns at once, and nothing is asked of a simulator until then."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Plain counts since it was made; from any moment between two turns of the loop."""
        ...
