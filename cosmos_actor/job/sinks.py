"""Sinks: who else is given the record of each episode, beside episodes.jsonl.

    a line in episodes.jsonl ──> queue of each sink ──> its own thread: make, sink(record), sink(record), …, close

A sink is what `make(settings, run directory)` gives, called with one record after another; `close` is called at the end
where it has one. Promises:

- No sink is felt by the job: the loop waits for none without a deadline, none ends the job, and episodes.jsonl has
  every line before any sink has its record.
- One controller gives a sink each episode at most once, in the order of the lines, as a copy of its own; also when the
  job goes back to a checkpoint and writes the line again.
- What a sink does not get is counted by its reason and told: `sink_trouble` at the first of a reason, `sink_lost` with
  all of them at the end.
- Over a restart it is at least once. Before a checkpoint is written every sink has taken what came before it, or is
  told to be late; a controller that is started again gives it anew what is done anew, which is what came after the
  checkpoint. After an end in order (the last step, a stop) nothing is done anew.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_actor.roles.plugins import SINKS
from cosmos_actor.simulator_bridge.mistakes import one_line

QUEUE_RECORDS = 10_000
"""Some megabytes. A sink that is slower than the simulators for long loses episodes; without a bound, the job would
lose its memory."""
SETTLE_S, CLOSE_S = 2.0, 5.0
"""Of all sinks together before a checkpoint, and at the end: a sink that hangs must not hold the job up."""
Record = Mapping[str, Any]
Make = Callable[[str], Callable[[Record], Any]]
"""The name of a sink -> the sink. Takes its time, and may raise anything."""
Tell = Callable[..., None]


class SinkThread:
    """One sink, made and called in a thread of its own. Nothing but `settle` and `left_behind` waits."""

    def __init__(self, name: str, make: Make, tell: Tell, most: int) -> None:
        self.name, self.offered = name, 0
        self._make, self._tell, self._most = make, tell, most
        self._queue: deque[Record] = deque()
        self._moved = threading.Condition()
        self._busy, self._holds, self._over, self._late = True, False, False, False
        """Busy: it is made, called or closed; it holds an episode while it is called with it."""
        self._lost: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def offer(self, record: Record) -> None:
        with self._moved:
            self.offered += 1
            full = len(self._queue) >= self._most
            if not full:
                self._queue.append(record)
                self._moved.notify_all()
        if full:
            self._trouble("dropped", f"it is {self._most} episodes behind; what comes now is dropped", 1)

    def settle(self, deadline_s: float) -> None:
        """Wait until it has taken all. One that was too late is not waited for again until it has."""
        with self._moved:
            if self._late and not self._idle():
                return
            self._late = not self._moved.wait_for(self._idle, deadline_s)
            behind = len(self._queue) + self._busy
        if self._late:
            self._trouble("late", f"it is {behind} episodes behind at a checkpoint: if the controller is killed now, "
                          "it never gets them", 0)

    def end(self) -> None:
        """Close it when it has taken all."""
        with self._moved:
            self._over = True
            self._moved.notify_all()

    def left_behind(self, deadline_s: float) -> None:
        """Wait for the end of the thread; what it has not taken by then it does not get. Tell what it did not get."""
        self._thread.join(max(0.0, deadline_s))
        if self._thread.is_alive():
            with self._moved:
                behind = len(self._queue) + self._holds
                self._queue.clear()
            self._trouble("left", f"it was {behind} episodes behind at the end of the run, and was not waited for",
                          behind)
        lost = {reason: count for reason, count in self.lost.items() if count}
        if lost:
            said = ", ".join(f"{count} {reason}" for reason, count in sorted(lost.items()))
            self._tell("sink_lost", sink=self.name, text=f"of {self.offered} episodes it did not get: {said}", **lost)

    @property
    def lost(self) -> dict[str, int]:
        """Reason -> episodes."""
        with self._moved:
            return dict(self._lost)

    def _run(self) -> None:
        try:
            sink = self._make(self.name)
        except BaseException as error:  # somebody else's code: were the thread to end, nobody would count
            sink = None
            self._trouble("failed", f"it can not be made: {one_line(error)}", 0)
        while (record := self._next()) is not None:
            self._give(sink, record)
        close = getattr(sink, "close", None)
        if close is not None:
            try:
                close()
            except BaseException as error:  # somebody else's code: were the thread to end, nobody would count
                self._trouble("close", f"its close raised {one_line(error)}", 0)

    def _give(self, sink: Any, record: Record) -> None:
        """A sink that raised at one record is given the next all the same."""
        if sink is None:
            self._trouble("failed", "", 1)
            return
        try:
            sink(record)
        except BaseException as error:  # somebody else's code: were the thread to end, nobody would count
            self._trouble("failed", f"it raised {one_line(error)} at an episode; it is given the next ones", 1)

    def _next(self) -> Record | None:
        """None at the end."""
        with self._moved:
            self._busy = self._holds = False
            self._moved.notify_all()
            self._moved.wait_for(lambda: self._queue or self._over)
            self._busy, self._holds = True, bool(self._queue)
            return self._queue.popleft() if self._queue else None

    def _idle(self) -> bool:
        return not self._queue and not self._busy

    def _trouble(self, reason: str, text: str, episodes: int) -> None:
        """Told the first time; a sink that fails at every episode must not fill events.jsonl."""
        with self._moved:
            first = reason not in self._lost
            self._lost[reason] += episodes
        if first:
            self._tell("sink_trouble", sink=self.name, reason=reason, text=text)


class Sinks:
    """All sinks of a run; see the module. Used from the recipe's thread."""

    def __init__(self, names: Sequence[str], make: Make, tell: Tell, *, most: int = QUEUE_RECORDS,
                 settle_s: float = SETTLE_S, close_s: float = CLOSE_S) -> None:
        self._settle_s, self._close_s = settle_s, close_s
        self._tell = tell
        self._threads = [SinkThread(name, make, self._told, most) for name in dict.fromkeys(names)]
        self._given: set[tuple[Any, ...]] = set()
        """Of lines that were cut off and may be written again."""

    def offer(self, record: Record) -> None:
        """Its line is in episodes.jsonl."""
        name = name_of(record)
        if name in self._given:
            self._given.discard(name)
            return
        for thread in self._threads:
            thread.offer(dict(record))

    def cut_off(self, records: Sequence[Record]) -> None:
        """Lines that were offered, and will be written again if their episodes count again."""
        self._given.update(map(name_of, records))

    def settle(self) -> None:
        """A checkpoint is about to be written."""
        until = time.monotonic() + self._settle_s
        for thread in self._threads:
            thread.settle(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """The job is over. Raises nothing."""
        for thread in self._threads:
            thread.end()
        until = time.monotonic() + self._close_s
        for thread in self._threads:
            thread.left_behind(until - time.monotonic())

    def statistics(self) -> dict[str, int]:
        """Episodes that a sink did not get: `NAME/REASON` -> count."""
        return {f"{thread.name}/{reason}": count for thread in self._threads
                for reason, count in sorted(thread.lost.items()) if count}

    def _told(self, event: str, **facts: Any) -> None:
        try:
            self._tell(event, **facts)
        except OSError:
            pass  # a disk that is full refuses the job's own next line too, which ends it and says why


def name_of(record: Record) -> tuple[Any, ...]:
    """What an episode is known by: units of training have one name in the whole run, trials the same at each step."""
    return (record["unit"], record["step"]) if "phase" in record else (record["unit"],)


def make_sinks(settings: Any, directory: Path, tell: Tell) -> Sinks:
    """Those that `sim.sinks` names."""
    def make(name: str) -> Callable[[Record], Any]:
        sink = SINKS.call(name, SINKS.load(name), settings, directory)
        if not callable(sink):
            raise TypeError(f"it is {type(sink).__name__}, which can not be called with a record")
        return sink  # type: ignore[no-any-return]

    return Sinks(settings.sim.sinks, make, tell)
