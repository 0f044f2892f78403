"""What one actor has in hand: messages that it handles, what it computes, its waits, and the pauses it has declared.

Nobody can see from outside whether a long computation gets on. Three things are distinguishable, and kept apart here:

- progress: a message or a piece of compute was done, or the role's code said so by `context.tick()`;
- no progress, but the process uses a CPU: a long computation, or a loop without an end;
- no progress and no CPU: it waits for something (a lock, a socket, another process). That is what `blocked` says.

A declared pause (`context.busy`) excuses all of it for as long as it said. Written by the worker's thread and the
loop's, read by the loop's; each entry is replaced whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

SHOWN = 8
"""Messages and waits that are named; a thousand of them would make a status of a megabyte."""
USED_SHARE = 0.01
"""Of one CPU between two looks. Idle threads use less; a computation on a machine that is twenty times overloaded still
gets more."""


@dataclass(frozen=True)
class Entry:
    """Something under way: what, with whom (an actor, a role, or nobody), since when."""

    what: str
    whom: str
    since: float
    until: float = 0.0


class InHand:
    """See the module. Times are of `now`, a clock that does not go back."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.progress = 0
        self._now = now
        self._numbers = itertools.count()
        self._messages: dict[int, Entry] = {}
        self._waits: dict[int, Entry] = {}
        self._pauses: dict[int, Entry] = {}
        self._computing: Entry | None = None
        self._progressed_at = self._last_in_hand = self._used_at = self._looked_at = now()
        self._cpu_s = 0.0

    # ---- what happens

    @contextmanager
    def message(self, name: str, of: str) -> Iterator[None]:
        """A handler runs, or waits for the worker. Its end is progress, also when it raised."""
        try:
            with self._entry(self._messages, name, of):
                yield
        finally:
            self.tick()

    @contextmanager
    def compute(self, label: str) -> Iterator[None]:
        """The worker computes; one piece at a time. Its end is progress, also when it raised."""
        self._computing = Entry(label, "", self._now())
        try:
            yield
        finally:
            self._computing = None
            self.tick()

    @contextmanager
    def waiting(self, what: str, on: str) -> Iterator[None]:
        """Something waits for `what`, which `on` (an actor or a role) is to bring."""
        with self._entry(self._waits, what, on):
            yield

    @contextmanager
    def pause(self, label: str, seconds: float) -> Iterator[None]:
        """For so long nobody may take this actor for stuck."""
        try:
            with self._entry(self._pauses, label, "", self._now() + seconds):
                yield
        finally:
            self.tick()

    def tick(self) -> None:
        """Something got done."""
        self.progress += 1
        self._progressed_at = self._now()

    def look(self, cpu_s: float) -> None:
        """The process, its loop left out, has used so many CPU seconds since it began. Call it a few times a second."""
        now = self._now()
        if cpu_s - self._cpu_s >= USED_SHARE * (now - self._looked_at):
            self._used_at = now
        self._cpu_s, self._looked_at = cpu_s, now
        if self._computing is not None or self._messages:
            self._last_in_hand = now

    # ---- what there is

    @property
    def label(self) -> str:
        """What is computed now, or nothing."""
        computing = self._computing
        return "" if computing is None else computing.what

    def paused(self) -> tuple[str, float]:
        """(label, seconds left) of the declared pause that ends last; ("", 0) without one."""
        now = self._now()
        last = max(list(self._pauses.values()), key=lambda pause: pause.until, default=None)
        return ("", 0.0) if last is None or last.until <= now else (last.what, last.until - now)

    def still_s(self) -> float:
        """How long what is computed now has made no progress; 0 while nothing is, or in a pause."""
        computing = self._computing
        if computing is None or self.paused()[1] > 0:
            return 0.0
        return self._now() - max(computing.since, self._progressed_at, self._pause_over())

    def blocked_s(self) -> float:
        """How much of `still_s` went by without use of a CPU."""
        return min(self.still_s(), self._now() - self._used_at)

    def facts(self) -> dict[str, Any]:
        """All of it as plain JSON, what there is none of left out; see `actors/wait_graph.py` for who reads it."""
        now, computing, (pause, left_s) = self._now(), self._computing, self.paused()
        facts: dict[str, Any] = {
            "messages": [_plain(entry, now, "of") for entry in _oldest(self._messages)],
            "waits": [_plain(entry, now, "on") for entry in _oldest(self._waits)],
        }
        if computing is not None:
            facts["computing"] = {"what": computing.what, "for_s": _short(now - computing.since),
                                  "still_s": _short(self.still_s()), "blocked_s": _short(self.blocked_s())}
        if left_s > 0:
            facts["pause"] = {"what": pause, "left_s": _short(left_s)}
        if computing is None and not self._messages:
            facts["idle_s"] = _short(now - self._last_in_hand)
        return {name: value for name, value in facts.items() if value not in ([], {})}

    def _pause_over(self) -> float:
        """When the last pause that is still open ran out."""
        return max((pause.until for pause in list(self._pauses.values())), default=0.0)

    @contextmanager
    def _entry(self, table: dict[int, Entry], what: str, whom: str, until: float = 0.0) -> Iterator[None]:
        number = next(self._numbers)
        table[number] = Entry(what, whom, self._now(), until)
        try:
            yield
        finally:
            del table[number]


def _oldest(table: dict[int, Entry]) -> list[Entry]:
    return sorted(list(table.values()), key=lambda entry: entry.since)[:SHOWN]


def _plain(entry: Entry, now: float, whom: str) -> dict[str, Any]:
    return {"what": entry.what, whom: entry.whom, "for_s": _short(now - entry.since)}


def _short(seconds: float) -> float:
    return round(seconds, 2)
