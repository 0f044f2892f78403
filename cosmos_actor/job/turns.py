"""Whose turn it is on a GPU that two sides share. Pure: events in, decisions out, no clock and no await.

    asked(ticket) -> waiting -> Begin -> held -> ended
                        `-> HandOver(side): nothing is held any more, the shell moves one side out and the other in
                                `-> handed(side) | failed()

Guarantees: tickets that are held at one time are of one side, which has the device; a hand-over begins only when none
is held, and none begins during one; a ticket waits for older ones of the other side and for nothing younger. So what
is asked in an order that could be done one by one is never stuck.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Side = Literal["policy", "rollout"]
TURN_TAKERS = get_args(Side)
POLICY, ROLLOUT = TURN_TAKERS


@dataclass(frozen=True)
class Begin:
    """These hold the device from now on."""

    tickets: tuple[int, ...]


@dataclass(frozen=True)
class HandOver:
    """Bring the device to `to`; then say `handed` or `failed`."""

    to: Side


Decision = Begin | HandOver


class Turns:
    """See the module. Tickets are numbers that the caller gives once each."""

    def __init__(self, turn: Side | None = None) -> None:
        self.turn = turn
        """Who has the device; None while it changes hands, and when that failed."""
        self.toward: Side | None = None
        """To whom it is being handed."""
        self._waiting: dict[int, Side] = {}
        """In the order of asking."""
        self._held: set[int] = set()

    @property
    def held(self) -> frozenset[int]:
        return frozenset(self._held)

    def asked(self, ticket: int, side: Side) -> list[Decision]:
        self._waiting[ticket] = side
        return self._decide()

    def ended(self, ticket: int) -> list[Decision]:
        """It is done with the device, or does not want it any more. One that is unknown changes nothing."""
        self._held.discard(ticket)
        self._waiting.pop(ticket, None)
        return self._decide()

    def handed(self, side: Side) -> list[Decision]:
        self.turn, self.toward = side, None
        return self._decide()

    def failed(self) -> None:
        """Nobody has it. Who waits is told by the caller and goes; the next that asks begins a hand-over anew."""
        self.turn = self.toward = None
        self._waiting.clear()

    def _decide(self) -> list[Decision]:
        first = next(iter(self._waiting.values()), None)
        if self.toward is not None or first is None:
            return []
        if first != self.turn:
            if self._held:
                return []
            self.turn, self.toward = None, first
            return [HandOver(first)]
        begun = []
        for ticket, side in list(self._waiting.items()):
            if side != self.turn:
                break
            del self._waiting[ticket]
            begun.append(ticket)
        self._held.update(begun)
        return [Begin(tuple(begun))]
