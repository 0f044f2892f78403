"""What the controller asks of those who have one device in turn; see job/hand_off.py.

`epoch` is the life of the job that asks, `turn` counts its hand-overs: together they only grow, and what is older than
the newest that came is refused. So a word that was long on its way wakes nobody in another's turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from cosmos_actor.bus.schema import schema


@schema("park_request", version=1)
@dataclass(frozen=True)
class ParkRequest:
    """The policy: leave the device. Answered with TurnOver when its state is on the host."""

    epoch: int
    turn: int


@schema("unpark_request", version=1)
@dataclass(frozen=True)
class UnparkRequest:
    """The policy: the device is free. Answered with TurnBegun when its state is there again."""

    epoch: int
    turn: int


@schema("sleep_request", version=1)
@dataclass(frozen=True)
class SleepRequest:
    """A rollout: end what is in flight and leave the device. Answered with TurnOver."""

    epoch: int
    turn: int
    level: int
    """See Sleeper.sleep."""


@schema("wake_request", version=1)
@dataclass(frozen=True)
class WakeRequest:
    """A rollout: the device is free; have memory for these parts there. Answered with TurnBegun."""

    epoch: int
    turn: int
    what: list[str]


@schema("turn_over", version=1)
@dataclass(frozen=True)
class TurnOver:
    """The device's memory is free of the one that says so."""

    seconds: float
    peak_bytes: int
    """Most that it had taken for tensors in this turn; 0 without a GPU."""
    used_bytes: int
    """Of the device, by everybody, at the end of this turn."""


@schema("turn_begun", version=1)
@dataclass(frozen=True)
class TurnBegun:
    seconds: float
