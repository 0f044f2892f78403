"""Lives that end before they serve. One may be bad luck; several in a row are a fault that no restart mends. Pure."""

from __future__ import annotations

from collections import Counter

from cosmos_actor.actors.runtime import HEAD_GONE

MOST_IN_VAIN = 3
"""Lives of one actor that may end in a row before they served. A start takes seconds to minutes, so the restarts of one
that always fails may never be frequent enough for `supervisor.intensity`."""


class Starts:
    """Which lives served, and how many in a row did not."""

    def __init__(self) -> None:
        self._serving: dict[str, str] = {}
        self._in_vain: Counter[str] = Counter()

    def served(self, actor: str, incarnation: str) -> None:
        """This life's setup is over."""
        self._serving[actor] = incarnation
        self._in_vain[actor] = 0

    def is_serving(self, actor: str, incarnation: str) -> bool:
        """Whether this life's setup was over, also where it has ended since."""
        return self._serving.get(actor) == incarnation

    def ended(self, actor: str, incarnation: str, reason: str) -> bool:
        """Note the end of a life that nobody asked to end; True when it is one in vain too many.

        One that was cut off from the run, or too starved to answer, tells nothing about starts.
        """
        if HEAD_GONE in reason:
            return False
        if not self.is_serving(actor, incarnation):
            self._in_vain[actor] += 1
        return self._in_vain[actor] >= MOST_IN_VAIN
