"""What a supervision decides: orders for the shell that owns the processes, and how everything ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class EndKind(Enum):
    """FINISHED: a significant child ended well. STOPPED: somebody asked. The other two are failures."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED_TO_START = "failed_to_start"
    GAVE_UP = "gave_up"


@dataclass(frozen=True)
class End:
    """Why the supervisor ended."""

    kind: EndKind
    reason: str

    @property
    def ok(self) -> bool:
        return self.kind in (EndKind.FINISHED, EndKind.STOPPED)


@dataclass(frozen=True)
class Start:
    actor: str
    incarnation: int


@dataclass(frozen=True)
class Terminate:
    """Ask it to stop."""

    actor: str


@dataclass(frozen=True)
class Kill:
    actor: str
    reason: str


@dataclass(frozen=True)
class Abandon:
    """It was killed and did not go; nothing waits for it any more."""

    actor: str


@dataclass(frozen=True)
class Restarting:
    """It will be started again (a Start follows), `delay_s` from now at the earliest."""

    actor: str
    delay_s: float
    reason: str


@dataclass(frozen=True)
class Stopping:
    """Everything is being stopped; an Ended follows."""

    end: End


@dataclass(frozen=True)
class Ended:
    end: End


Decision = Start | Terminate | Kill | Abandon | Restarting | Stopping | Ended
