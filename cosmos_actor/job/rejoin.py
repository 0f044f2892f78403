"""A joined actor that loses its run comes back as a new life, once the network or the run is back.

What it did before may run elsewhere by now, so the old life is over: a new incarnation, which the run takes as any
other that joins. Nothing is carried over.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from cosmos_actor.actors.head import NAME_TAKEN
from cosmos_actor.actors.runtime import HeadLost
from cosmos_actor.bus import BusError, DeadlineExceeded, Identity, PeerLost, PeerRefused, new_incarnation

PAUSE_S = 0.5
"""Between a life that ended and the next try."""


class LeaveAsked:
    """Whether SIGTERM or SIGINT came, in whichever life, or between two of them."""

    def __init__(self) -> None:
        self._asked = False

    def __bool__(self) -> bool:
        return self._asked

    def note(self, *signal_and_frame: object) -> None:
        self._asked = True

    def pause(self, seconds: float) -> None:
        """Sleep, and hear signals: each life's loop takes its handlers with it."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.note)
        time.sleep(seconds)


def live(life: Callable[[Identity], int], identity: Identity, rejoin_s: float, asked: LeaveAsked, *,
         clock: Callable[[], float] = time.monotonic) -> int:
    """The exit code of `life`, which is begun anew for up to `rejoin_s` after each time that it raised HeadLost.

    0 where the actor was asked to leave: it has left then.

    Raises what ended the last one: HeadLost at once where the run said that it is over, another error when no new
    life could begin in time.
    """
    until: float | None = None
    while True:
        try:
            return life(identity)
        except HeadLost as lost:
            if asked:
                return 0
            if lost.final or rejoin_s <= 0:
                raise
            until = clock() + rejoin_s
            print(f"{identity.actor}: {lost}; joining again as soon as it can be reached, for {rejoin_s:g} s",
                  file=sys.stderr, flush=True)
        except (DeadlineExceeded, PeerLost, PeerRefused) as error:
            if asked and until is not None:
                return 0
            if until is None or clock() >= until or not _passes(error):
                raise
        asked.pause(PAUSE_S)
        if asked:
            return 0
        identity = replace(identity, incarnation=new_incarnation())


def _passes(error: BusError) -> bool:
    """Whether it may change in a moment: nobody answers, or the run has not seen yet that the old life is over."""
    return not isinstance(error, PeerRefused) or NAME_TAKEN in str(error)
