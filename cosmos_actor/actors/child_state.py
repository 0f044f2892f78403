"""One child as a supervision sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.restart_policy import RestartWindow


class State(Enum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    KILLED = "killed"
    DOWN = "down"


_ALIVE = {State.STARTING, State.READY, State.STOPPING, State.KILLED}


class Fate(Enum):
    """What becomes of a child once a planned stop of it is done."""

    RESTART = "restart"
    DOWN = "down"
    FORGET = "forget"


@dataclass
class Child:
    """One child as the supervision sees it. For readers; only Supervision changes it."""

    spec: ChildSpec
    after: tuple[str, ...]
    state: State = State.WAITING
    incarnation: int = 0
    proven: bool = False
    # it was ready once
    added: bool = False
    # after the supervisor's own start
    not_before: float = 0.0
    deadline: float | None = None
    # of being ready, of having stopped, of having gone; None while ready or without a process
    heard_at: float = 0.0
    silent_until: float = 0.0
    # no heartbeat is missed before
    progress: str = ""
    kill_reason: str | None = None
    fate: Fate | None = None
    restarts: RestartWindow = field(default_factory=lambda: RestartWindow(1.0))

    @property
    def alive(self) -> bool:
        return self.state in _ALIVE
