"""At least once on the wire, once at the handler. Pure.

    sender    add -> (sent, sent again after every new wire) -> done(number): forgotten
    receiver  accept: NEW -> handler -> finish(number, result): kept until the sender's floor passes it

Numbers start at 1 and belong to (source, incarnation, session, channel).
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Tuple

NEW, RUNNING, FINISHED, SETTLED, GAP, OVER = "new", "running", "finished", "settled", "gap", "over"
"""Verdicts: first time here; its handler runs; its result is kept; long settled; numbers are missing; no credit."""


class Outbox:
    """Everything that was accepted and is not done yet, in order; only ``done`` frees it."""

    def __init__(self) -> None:
        self.next_number = 1
        self.redelivered = 0
        self.floor = 1
        """Every number below it is done."""
        self._entries: Dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Any) -> int:
        """Its number, which is `next_number`."""
        number = self.next_number
        self.next_number = number + 1
        self._entries[number] = entry
        return number

    def done(self, number: int) -> Optional[Any]:
        """The entry, the first time; None for every later time. Raises ValueError for a number that was never sent."""
        if not 0 < number < self.next_number:
            raise ValueError(f"number {number} was never sent")
        entry = self._entries.pop(number, None)
        self._raise_floor()
        return entry

    def done_range(self, first: int, last: int) -> List[Any]:
        """Entries of first..last that were not done before. Raises ValueError for numbers that were never sent."""
        if not 0 < first <= last < self.next_number:
            raise ValueError(f"numbers {first}..{last} were never sent")
        if last - first >= len(self._entries):
            numbers = [number for number in self._entries if first <= number <= last]
        else:
            numbers = [number for number in range(first, last + 1) if number in self._entries]
        entries = [self._entries.pop(number) for number in numbers]
        self._raise_floor()
        return entries

    def _raise_floor(self) -> None:
        while self.floor < self.next_number and self.floor not in self._entries:
            self.floor += 1

    def oldest(self) -> Optional[Any]:
        """The entry that waits longest, or None."""
        return self._entries.get(self.floor)

    def again(self, first: int = 0) -> List[Any]:
        """Entries from this number on, in order, to be sent again."""
        entries = [entry for number, entry in self._entries.items() if number >= first]
        self.redelivered += len(entries)
        return entries

    def clear(self) -> List[Any]:
        """Take everything out: the peer will never be heard of again."""
        entries, self._entries = list(self._entries.values()), {}
        self._raise_floor()
        return entries


class Inbox:
    """A number reaches the handler once, in order; its result is repeated until the sender has it."""

    def __init__(self, window: int) -> None:
        """At most `window` numbers run at a time: what the sender was granted."""
        self._window = window
        self.expected = 1
        self.floor = 1
        self.duplicates = 0
        self.gaps = 0
        self._running: Dict[int, None] = {}
        self._results: Dict[int, Any] = {}

    def accept(self, number: int) -> str:
        """The verdict. NEW makes the number RUNNING; GAP and OVER change nothing but a count."""
        if number == self.expected:
            if len(self._running) >= self._window:
                return OVER
            self.expected = number + 1
            self._running[number] = None
            return NEW
        if number > self.expected:
            self.gaps += 1
            return GAP
        self.duplicates += 1
        if number in self._running:
            return RUNNING
        return FINISHED if number in self._results else SETTLED

    def finish(self, number: int, result: Any = None) -> bool:
        """The handler is through. False (and no effect) for a number that is not running."""
        if number not in self._running:
            return False
        del self._running[number]
        if number >= self.floor:
            self._results[number] = result
        return True

    def result(self, number: int) -> Any:
        return self._results[number]

    def release(self, floor: int) -> None:
        """The sender knows of everything below; raises ValueError for numbers that never came."""
        if floor > self.expected:
            raise ValueError(f"floor {floor} is above the next number {self.expected}")
        if floor <= self.floor:
            return
        if floor - self.floor > len(self._results):
            self._results = {number: result for number, result in self._results.items() if number >= floor}
        else:
            for number in range(self.floor, floor):
                self._results.pop(number, None)
        self.floor = floor

    @property
    def running(self) -> int:
        return len(self._running)

    def results(self) -> Iterator[Tuple[int, Any]]:
        return iter(list(self._results.items()))

    def statistics(self) -> Dict[str, int]:
        return {
            "received": self.expected - 1,
            "running": len(self._running),
            "results_kept": len(self._results),
            "duplicates": self.duplicates,
            "gaps": self.gaps,
        }


class Ranges:
    """Numbers as few (first, last) pairs, for numbers that mostly come in order."""

    def __init__(self) -> None:
        self._pairs: List[List[int]] = []

    def add(self, number: int) -> None:
        if self._pairs and self._pairs[-1][1] == number - 1:
            self._pairs[-1][1] = number
        else:
            self._pairs.append([number, number])

    def take(self) -> List[List[int]]:
        pairs, self._pairs = self._pairs, []
        return pairs

    def __bool__(self) -> bool:
        return bool(self._pairs)
