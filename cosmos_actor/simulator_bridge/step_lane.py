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
import functools
import os
import select
import time
from struct import Struct
from struct import error as StructError
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

from cosmos_actor.bus import BusError, DeadlineExceeded
from cosmos_actor.bus.bulk.arena import Arena, ArenaView
from cosmos_actor.bus.busy_poll import BusyPoll
from cosmos_actor.bus.lane import open_pipe
from cosmos_actor.bus.schema import from_plain, pack, schema_key, to_plain, unpack

from .contract import Description
from .messages import Assignment, Attach, Step, Stepped
from .step_memory import MOST_BYTES, Arrays, Shapes, answer_shapes, request_shapes

REQUEST = Struct("<QIIBH")
"""Number, n, K, whether it is of all slots in their order, bytes of the queued units that follow."""
ANSWER = Struct("<QBId")
"""Number, one of the words below, m, seconds."""
READY, ANSWERED, BY_BUS = range(3)
RECORD_BYTES = 4096
"""The kernel takes this much whole or not at all (PIPE_BUF). There is at most one record in a pipe, and READY."""
TURN_S = 0.005
"""After so long the loop has a turn, for heartbeats and signals, however quickly requests come."""


_ASSIGNMENT = schema_key(Assignment)


class _End:
    """What both ends have: memory and a bell of their own, and those of the other side."""

    def __init__(self, description: Description, envs: int, ours: Callable[..., Shapes],
                 theirs: Callable[..., Shapes]) -> None:
        """Raises BusError where there is no memory for it."""
        self._ours, self._theirs = Arrays(ours, description), Arrays(theirs, description)
        capacity = self._ours.capacity_bytes(envs)
        if max(capacity, self._theirs.capacity_bytes(envs)) > MOST_BYTES:
            raise BusError("its observations are too large for the lane of steps")
        self._ringer = -1
        try:
            self._arena = Arena(capacity)
            self._bell, self._other_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise BusError("no lane of steps: {}".format(error.strerror)) from None
        self._view: Optional[ArenaView] = None
        self._ours.lie_in(self._arena.view(), self._arena.first_byte, self._arena.capacity_bytes)
        self._loop: Any = None
        self.other_process = False
        """Whether the other side is in one: then there is a sense in waiting without the loop."""
        self.closed = False

    def offer(self) -> List[Any]:
        """For the other side: process, descriptor, token and size of the memory; descriptor of the bell."""
        return [os.getpid(), self._arena.fd, self._arena.token, self._arena.size_bytes, self._bell]

    def _open(self, offer: Any, heard: Callable[[], None]) -> None:
        """Raises BusError if what the other side offers can not be opened here. `heard`: its bell may have rung."""
        if type(offer) is not list or [type(part) for part in offer] != [int, int, bytes, int, int]:
            raise BusError("no offer of a lane of steps")
        pid, fd, token, size_bytes, bell = offer
        self.other_process = pid != os.getpid()
        self._view = ArenaView(pid, fd, token, size_bytes)
        self._theirs.lie_in(self._view.mapping, self._view.first_byte, size_bytes - self._view.first_byte)
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
        self._ours.close()
        self._theirs.close()
        self._arena.close()
        if self._view is not None:
            self._view.close()


class ServedSteps(_End):
    """The simulator's end: every request that comes is answered, by `answer` or by the word BY_BUS."""

    def __init__(self, description: Description, envs: int, answer: Callable[[Step], Stepped],
                 busy_poll: BusyPoll) -> None:
        super().__init__(description, envs, answer_shapes, request_shapes)
        self._answer, self._busy_poll = answer, busy_poll
        self._names = list(description.observations)
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        self._has_rung = functools.partial(poll.poll, 0)

    def open(self, offer: Any) -> None:
        """From now on it may be asked. Raises BusError."""
        self._open(offer, self._serve)
        self._ring(ANSWER.pack(0, READY, 0, 0.0))

    def _serve(self) -> None:
        """Answer, and stay awake for what comes next."""
        until = time.monotonic() + TURN_S
        while not self.closed and self._wait():
            self._ring(self._answered(self._rung()))
            if time.monotonic() >= until:
                self._loop.call_soon(self._serve)
                return

    def _wait(self) -> bool:
        """Whether the bell has rung."""
        return self._busy_poll.spin(self._has_rung) if self.other_process else bool(self._has_rung())

    def _answered(self, record: bytes) -> bytes:
        number, n, K, every, nbytes = REQUEST.unpack_from(record)
        try:
            slots, actions = self._theirs.of(n, K)
            queue = unqueued(record[REQUEST.size:]) if nbytes else []
            stepped = self._answer(Step(number, actions, None if every else slots.copy(), queue))
            m = self._write(stepped, n, K)
        except Exception:  # the bus gives the same answer, or says what is wrong
            return ANSWER.pack(number, BY_BUS, 0, 0.0)
        return ANSWER.pack(number, ANSWERED, m, stepped.seconds)

    def _write(self, stepped: Stepped, n: int, K: int) -> int:
        """m. Raises ValueError or TypeError for what has no place here."""
        if stepped.failures:
            raise ValueError("failures go by the bus")
        m, names = 0, self._names
        rewards, rows, *seen = self._ours.of(n, K)
        rewards[...], rows[...] = stepped.rewards, stepped.rows
        for array, name in zip(seen, names):
            array[...] = stepped.observations[name]
        if stepped.final_observations:
            for array, name in zip(seen[len(names):], names):
                final = stepped.final_observations[name]
                m = len(final)
                array[:m] = final
        return m


class AskedSteps(_End):
    """The driver's end. One request at a time; what it can not do is left to the bus."""

    def __init__(self, description: Description, envs: int, busy_poll: BusyPoll) -> None:
        super().__init__(description, envs, request_shapes, answer_shapes)
        self._busy_poll = busy_poll
        self._names = list(description.observations)
        self._shape, self._dtype = description.action.shape, np.dtype(description.action.dtype)
        self._every = list(range(envs))
        self._ready = False
        self._under_way: Optional[Tuple[int, int, int]] = None
        """Number, n and K of what was not answered yet, also when nobody waits for it any more."""
        self._waiter: Any = None
        self._until = self._looks_at = 0.0
        self._timer: Optional[asyncio.TimerHandle] = None
        self.steps = 0
        """Requests that were answered this way."""

    def open(self, offer: Any) -> None:
        """Raises BusError."""
        self._open(offer, self._heard)

    async def ask(self, request: Step, until: float) -> Optional[Stepped]:
        """The answer; None: ask by the bus. Raises DeadlineExceeded at `until`, of the loop's clock."""
        if not self._ready or self.closed or self._under_way is not None or request.intermediate:
            return None
        record = self._written(request)
        if record is None or not self._ring(record):
            return None
        waiter = self._waiter = self._loop.create_future()
        self._expect(until)
        self._busy_poll.begin()
        return await waiter  # type: ignore[no-any-return]

    def close(self) -> None:
        super().close()
        if self._timer is not None:
            self._timer.cancel()
        self._settle(None)

    def _written(self, request: Step) -> Optional[bytes]:
        actions, slots = request.actions, request.slots
        n = len(self._every) if slots is None else len(slots)
        if actions.dtype != self._dtype or actions.ndim < 2 or actions.shape != (n, actions.shape[1], *self._shape):
            return None
        queue = queued(request.queue) if request.queue else b""
        arrays = self._ours.of(n, actions.shape[1])
        if queue is None or arrays is None:
            return None
        if slots is not None:
            arrays[0][...] = slots
        arrays[1][...] = actions
        self._under_way = request.number, n, actions.shape[1]
        return REQUEST.pack(request.number, n, actions.shape[1], slots is None, len(queue)) + queue

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
        names = self._names
        rewards, rows, *seen = self._theirs.of(n, K)
        self.steps += 1
        return Stepped(number, {name: array.copy() for name, array in zip(names, seen)}, rewards.copy(), rows.copy(),
                       {name: array[:m].copy() for name, array in zip(names, seen[len(names):])} if m else {}, {}, [],
                       seconds)

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
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._loop.time() < self._until:
            self._expect(self._until)
        else:
            waiter.set_exception(DeadlineExceeded("no answer"))


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


def queued(queue: Sequence[Assignment]) -> Optional[bytes]:
    """None: too much for a record, or something that the bus has words for."""
    try:
        packed = pack([to_plain(item)[1] for item in queue])
    except (BusError, OverflowError, ValueError):
        return None
    return packed if len(packed) <= RECORD_BYTES - REQUEST.size else None


def unqueued(packed: bytes) -> List[Assignment]:
    """Raises ValueError or BusError."""
    return [from_plain(_ASSIGNMENT, plain, ())[0] for plain in unpack(packed)]
