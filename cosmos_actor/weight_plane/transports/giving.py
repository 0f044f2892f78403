"""The seam between the raw server and what gives arrays otherwise than through its socket. Importable without torch."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Protocol

from cosmos_actor.weight_plane.errors import WeightError
from cosmos_actor.weight_plane.transports.raw_wire import Ask


class GivingRefused(WeightError):
    """An ask that can not be met; the asker is told, and the connection goes on."""


class Turn(Protocol):
    """One asker's."""

    def prepare(self, ask: Ask, found: Any) -> tuple[bytes, Callable[[], None]]:
        """(what the answer says, what to do once it was sent). `found`: [bytes] uint8, living until that returns.

        Raises GivingRefused. What is to be done ends within a bound of its own, or raises TransportLost.
        """
        ...

    def close(self) -> None:
        """The asker is gone."""
        ...


class Giving(Protocol):
    def to(self, asker: socket.socket) -> Turn:
        """For one connection: `asker` tells when the other end is gone."""
        ...
