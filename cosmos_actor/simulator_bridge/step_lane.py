"""Steps between a simulator and its driver on one host, past the bus: each side writes memory that the other maps.

    driver     slots, actions ──> its memory, then rings: number, n, K, queued units
    simulator  rewards, observations ──> its memory, then rings: number, m, seconds
               or rings: ask for this number by the bus

A bell is a pipe, so that a loop can wait for it; its lock also orders what was written to the memory before. Who rings
next has read what was written before, since one request is under way at a time. What does not fit, fails, or was under
way when its link ended, is asked for by the bus under the same number: no step is made twice.

Each side is open after `open`; the driver asks this way only after the simulator has rung READY.
"""

from __future__ import annotations

import asyncio
import os
import time
from math import inf
from operator import attrgetter
from struct import Struct
from struct import error as StructError
from typing import Any, Callable, List, Optional, Sequence, Tuple

import msgpack  # type: ignore[import-untyped]
import numpy as np

from cosmos_actor.bus import BusError
from cosmos_actor.bus.bulk.arena import Arena, ArenaView
from cosmos_actor.bus.busy_poll import BusyPoll
from cosmos_actor.bus.lane import open_pipe
from cosmos_actor.bus.schema import unpack

from .contract import Description, WorkUnit
from .messages import Assignment, Attach, Step, Stepped
from .step_memory import ALIGNMENT_BYTES, MOST_BYTES, Answers, Requests

REQUEST = Struct("<QIIBH")
"""Number, n, K, whether it is of all slots in their order, bytes of the queued units that follow."""
ANSWER = Struct("<QBId")
"""Number, one of the words below, m, seconds."""
READY, ANSWERED, BY_BUS = range(3)
RECORD_BYTES = 4096
"""The kernel takes this much whole or not at all (PIPE_BUF). There is at most one record in a pipe, and READY."""
TURN_S = 0.005
"""After so long the loop has a turn, for heartbeats and signals, however quickly requests come."""
LONG_S = 0.001
"""A step that took longer is waited for asleep, and so is what follows it: a wakeup is little beside it, and whoever
turns meanwhile takes a processor from simulators that compute."""
SHORT_S = 0.0005
"""A step that took longer is waited for by the loop, which serves others meanwhile."""

_ASSIGNED = attrgetter("slot", "unit.unit_id", "unit.task", "unit.seed", "unit.initial_state", "unit.max_steps",
                       "unit.attempt")
_TYPES = (int, str, str, int, int, int, int)


class _End:
    """What both ends have: memory and a bell of their own, and those of the other side."""

    def __init__(self, ours: Any, theirs: Any, envs: int) -> None:
        """Raises BusError where there is no memory for it."""
        self._ours, self._theirs = ours, theirs
        capacity = ours.capacity_bytes(envs) + ALIGNMENT_BYTES
        if max(capacity, theirs.capacity_bytes(envs)) > MOST_BYTES:
            raise BusError("its observations are too large for a lane of steps")
        try:
            self._arena = Arena(capacity)
            self._bell, self._other_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise BusError("no lane of steps: {}".format(error.strerror)) from None
        first = self._arena.first_byte
        self._number = self._arena.view()[first:first + ALIGNMENT_BYTES].cast("Q")
        """Of what we rang for last: for a look that costs no call of the kernel."""
        self._number_there: Any = (0,)
        ours.lie_in(self._arena.view(), first + ALIGNMENT_BYTES, self._arena.capacity_bytes - ALIGNMENT_BYTES)
        self._view: Optional[ArenaView] = None
        self._ringer = -1
        self._loop: Any = None
        self.closed = False

    def offer(self) -> List[Any]:
        """For the other side: process, descriptor, token and size of the memory; descriptor of the bell."""
        return [os.getpid(), self._arena.fd, self._arena.token, self._arena.size_bytes, self._bell]

    def _open(self, offer: Any, heard: Callable[[], None]) -> None:
        """Raises BusError if what the other side offers can not be opened here. `heard`: its bell may have rung."""
        if type(offer) is not list or [type(part) for part in offer] != [int, int, bytes, int, int]:
            raise BusError("no offer of a lane of steps")
        pid, fd, token, size_bytes, bell = offer
        self._view = ArenaView(pid, fd, token, size_bytes)
        first = self._view.first_byte + ALIGNMENT_BYTES
        if first > size_bytes:
            raise BusError("no memory for a lane of steps")
        self._number_there = memoryview(self._view.mapping)[first - ALIGNMENT_BYTES:first].cast("Q")
        self._theirs.lie_in(self._view.mapping, first, size_bytes - first)
        self._ringer = open_pipe(pid, bell)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._bell, heard)

    def _ring(self, record: bytes) -> bool:
        """False: nobody reads."""
        try:
            return os.write(self._ringer, record) == len(record)
        except OSError:
            return False

    def _rung(self) -> bytes:
        """What has come, or nothing."""
        try:
            return os.read(self._bell, RECORD_BYTES)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """A second time has no effect."""
        if self.closed:
            return
        self.closed = True
        if self._loop is not None:
            self._loop.remove_reader(self._bell)
        for fd in (self._bell, self._other_end, self._ringer):
            if fd >= 0:
                os.close(fd)
        self._ringer = -1
        self._ours.close()
        self._theirs.close()
        self._number = self._number_there = (0,)
        self._arena.close()
        if self._view is not None:
            self._view.close()


class ServedSteps(_End):
    """The simulator's end: every request that comes is answered, by `answer` or by the word BY_BUS."""

    def __init__(self, description: Description, envs: int, answer: Callable[[Step], Stepped],
                 busy_poll: BusyPoll) -> None:
        super().__init__(Answers(description), Requests(description), envs)
        self._answer, self._busy_poll = answer, busy_poll
        self._seen = 0
        """Number of the last request that was read."""
        self._seconds = self._answered_at = 0.0
        """What the last step took, and when it was answered if that was not long."""

    def open(self, offer: Any) -> None:
        """From now on it may be asked. Raises BusError."""
        self._open(offer, self._serve)
        if offer[0] == os.getpid():
            self._busy_poll = BusyPoll(0.0)  # who waits without its loop waits for nobody but others
        self._ring(ANSWER.pack(0, READY, 0, 0.0))

    def _serve(self) -> None:
        """Answer, and stay awake for what comes next if it came soon the last time."""
        now = time.monotonic()
        until, soon = now + TURN_S, now - self._answered_at <= self._busy_poll.seconds
        record = self._rung()
        while record:
            self._ring(self._answered(record))
            if self.closed:
                return
            self._number[0] = self._seen  # after the bell, as the driver does
            if self._seconds > LONG_S:
                return
            self._answered_at = time.monotonic()
            if self._answered_at >= until:
                if soon:
                    self._loop.call_soon(self._stay)
                return
            record = self._rung() if soon and self._busy_poll.spin(self._has_rung) else b""

    def _stay(self) -> None:
        if not self.closed and self._busy_poll.spin(self._has_rung):
            self._serve()

    def _has_rung(self) -> bool:
        return self._number_there[0] != self._seen  # type: ignore[no-any-return]

    def _answered(self, record: bytes) -> bytes:
        self._seen, n, K, every, nbytes = REQUEST.unpack_from(record)
        number, self._seconds = self._seen, inf
        try:
            slots, actions = self._theirs.of(n, K)
            queue = unqueued(record[REQUEST.size:]) if nbytes else []
            stepped = self._answer(Step(number, actions, None if every else slots.copy(), queue))
            self._seconds = stepped.seconds
            return ANSWER.pack(number, ANSWERED, self._write(stepped, n, K), stepped.seconds)
        except Exception:  # the bus gives the same answer, or says what is wrong
            return ANSWER.pack(number, BY_BUS, 0, 0.0)

    def _write(self, stepped: Stepped, n: int, K: int) -> int:
        """m. Raises ValueError or TypeError for what has no place here."""
        if stepped.failures:
            raise ValueError("failures go by the bus")
        rewards, rows, seen, final = self._ours.of(n, K)
        rewards[:] = stepped.rewards
        rows[:] = stepped.rows
        for name, array in seen:
            array[:] = stepped.observations[name]
        m = 0
        if stepped.final_observations:
            for name, array in final:
                last = stepped.final_observations[name]
                m = len(last)
                array[:m] = last
        return m


class AskedSteps(_End):
    """The driver's end. One request at a time; what it can not do is left to the bus."""

    def __init__(self, description: Description, envs: int, busy_poll: BusyPoll) -> None:
        super().__init__(Requests(description), Answers(description), envs)
        self._envs, self._busy_poll = envs, busy_poll
        self._dtype = np.dtype(description.action.dtype)
        self._ready = False
        self._under_way: Optional[Tuple[int, int, int]] = None
        """Number, n and K of what was not answered yet, also when nobody waits for it any more."""
        self._waiter: Any = None
        self._seconds = 0.0
        """What the last step took there."""
        self._by_loop = True
        """Always, since the other end is in this process, or has but this processor."""
        self._turn: Any = None
        """The loop's next one, once a step was waited for without it; after `_turn_due`, monotonic, none is."""
        self._turn_due = 0.0
        self._until = self._looks_at = 0.0
        self._timer: Optional[asyncio.TimerHandle] = None

    def open(self, offer: Any) -> None:
        """It may be asked as soon as the other end is open too. Raises BusError."""
        self._open(offer, self._heard)
        self._by_loop = offer[0] == os.getpid() or len(os.sched_getaffinity(0)) == 1

    def ask(self, request: Step, until: float, alone: bool = False) -> Any:
        """A future of the answer, or of None: ask by the bus; None instead of a future says so at once.

        None also at `until`, of the loop's clock: the bus has the words for it. `alone`: nobody else's step is waited
        for on this loop, so that a short one may be waited for without it.
        """
        if not self._ready or self.closed or self._under_way is not None or request.intermediate:
            return None
        record = self._written(request)
        if record is None or not self._ring(record):
            return None
        self._number[0] = request.number  # after the bell: who sees it finds the bell rung
        waiter = self._waiter = self._loop.create_future()
        self._expect(until)
        if self._seconds <= LONG_S and not (alone and self._answered_at_once()):
            self._busy_poll.begin()
        return waiter

    def _answered_at_once(self) -> bool:
        """Stay awake without the loop, but let it turn every TURN_S: whether the answer came and was read."""
        if self._by_loop or self._seconds > SHORT_S:
            return False
        now = time.monotonic()
        if self._turn is None:
            self._turn, self._turn_due = self._loop.call_soon(self._turned), now + TURN_S
        elif now >= self._turn_due:
            return False
        if not self._busy_poll.spin(self._has_answered, self._seconds):
            return False
        self._heard()
        return True

    def _turned(self) -> None:
        self._turn = None

    def _has_answered(self) -> bool:
        return self._number_there[0] == self._number[0]  # type: ignore[no-any-return]

    def close(self) -> None:
        super().close()
        if self._timer is not None:
            self._timer.cancel()
        self._settle(None)

    def _written(self, request: Step) -> Optional[bytes]:
        given, which = request.actions, request.slots
        if not isinstance(given, np.ndarray):
            return None
        n, K = self._envs if which is None else len(which), given.shape[1] if given.ndim > 1 else 0
        arrays = self._ours.of(n, K)
        if arrays is None or given.dtype != self._dtype or given.shape != arrays.actions.shape:
            return None
        queue = queued(request.queue) if request.queue else b""
        if queue is None:
            return None
        slots, actions = arrays
        actions[:] = given
        if which is not None:
            slots[:] = which
        self._under_way = request.number, n, K
        return REQUEST.pack(request.number, n, K, which is None, len(queue)) + queue

    def _heard(self) -> None:
        try:
            for number, word, m, seconds in ANSWER.iter_unpack(self._rung()):
                if word == READY:
                    self._ready = True
                elif self._under_way is not None and number == self._under_way[0]:
                    (_, n, K), self._under_way = self._under_way, None
                    self._busy_poll.heard()
                    self._settle(self._read(number, n, K, m, seconds) if word == ANSWERED else None)
        except (StructError, ValueError):
            self.close()  # whoever writes such answers is asked by the bus

    def _read(self, number: int, n: int, K: int, m: int, seconds: float) -> Stepped:
        if m > n:
            raise ValueError("more slots ended than were asked for")
        rewards, rows, seen, final = self._theirs.of(n, K)
        self._seconds = seconds
        return Stepped(number, {name: array.copy() for name, array in seen}, rewards.copy(), rows.copy(),
                       {name: array[:m].copy() for name, array in final} if m else {}, {}, [], seconds)

    def _settle(self, value: Optional[Stepped]) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(value)

    # ---- the deadline: one timer for many requests, since each would cost as much as a step of a small world

    def _expect(self, until: float) -> None:
        self._until = until
        if self._timer is None or until < self._looks_at:
            if self._timer is not None:
                self._timer.cancel()
            self._looks_at, self._timer = until, self._loop.call_at(until, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() < self._until:
            self._expect(self._until)
        else:
            self._settle(None)


def asked_steps(offer: Attach, busy_poll: BusyPoll) -> Optional[AskedSteps]:
    """The driver's end for who attaches; None: it has none, or it can not be opened here."""
    if offer.steps is None:
        return None
    lane = None
    try:
        lane = AskedSteps(offer.description, offer.envs, busy_poll)
        lane.open(offer.steps)
    except BusError:
        if lane is not None:
            lane.close()
        return None
    return lane


def open_lane(lane: ServedSteps, offer: Any) -> None:
    """The simulator's end towards the driver's `offer`; closed where there is none or it can not be opened."""
    try:
        lane.open(offer)
    except BusError:
        lane.close()


_pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack


def queued(queue: Sequence[Assignment]) -> Optional[bytes]:
    """None: too much for a record, or something that the bus has words for."""
    plain = [_ASSIGNED(item) for item in queue]
    if any(tuple(map(type, item)) != _TYPES for item in plain):
        return None
    try:
        packed: bytes = _pack(plain)
    except (OverflowError, ValueError):
        return None
    return packed if len(packed) <= RECORD_BYTES - REQUEST.size else None


def unqueued(packed: bytes) -> List[Assignment]:
    """Raises ValueError or TypeError."""
    queue = []
    for item in unpack(packed):
        if tuple(map(type, item)) != _TYPES:
            raise TypeError("a unit that is none")
        queue.append(Assignment(item[0], WorkUnit(*item[1:])))
    return queue
