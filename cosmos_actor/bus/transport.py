"""The seam below the bus: whole messages between two ends, and word of when an end comes and goes.

A wire is one connection, once. It never comes back: a dialler that wants to go on dials anew, under the same session.
Frames of one wire arrive in order, unchanged or not at all; nothing else is promised.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

try:
    from typing import Protocol
except ImportError:  # pragma: no cover
    Protocol = object  # type: ignore[assignment]

from .identity import Identity
from .keys import KeyRing
from .limits import Limits


class Wire(Protocol):
    """One end of a connection. Used by its event loop's thread only."""

    name: str
    role: Optional[str]
    """The role that the peer's key belongs to; None where there are no keys."""

    def send(self, frames: List[Any]) -> bool:
        """Hand a message over. False: it was not taken, the wire is or will be down."""

    def close(self) -> None:
        """No word of this wire any more, in either direction. A second time has no effect."""


class WireOwner(Protocol):
    """Who is told about wires. Called by the event loop, never from inside a call into the transport."""

    def wire_up(self, wire: Wire) -> None:
        """A dialled wire can carry messages."""

    def wire_frames(self, wire: Wire, frames: List[Any]) -> None:
        """A whole message came. A listener learns of a new wire by its first message."""

    def wire_down(self, wire: Wire, reason: str, refused: bool) -> None:
        """The wire is gone. `refused`: dialling again is no use, the reason says why."""


class Transport(Protocol):
    """Makes wires. One per bus."""

    between_processes: bool
    """Whether a message is copied and encrypted on its way, so that shared memory saves something."""

    def open(self, identity: Identity, keys: Optional[KeyRing], limits: Limits) -> None:
        """Called by the running event loop, once, before anything else."""

    def listen(self, address: str, owner: WireOwner) -> str:
        """Accept wires; returns the address that others can dial. Raises AddressInUse."""

    def dial(self, address: str, role: str, owner: WireOwner) -> Wire:
        """Start one attempt to reach an actor of this role; `owner` hears how it ends, always."""

    def close(self, linger_ms: int) -> None:
        """Close every wire; what was taken is sent for at most this long."""

    def statistics(self) -> Dict[str, Any]:
        """Counters since the start."""
