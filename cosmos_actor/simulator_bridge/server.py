"""A simulator on the bus: it dials its driver, offers itself, and answers until one of them is through.

    dial ──> Attach ──> serve ──link lost──> dial again: a new life of the actor, the same session and worlds
                          ├──the driver says goodbye and nobody listens there any more: the run is over
                          └──asked to leave ──> Detach

Requests are executed by the event loop's own thread, one at a time, so all calls of the simulator come from there.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import socket
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from cosmos_actor.bus import (
    Bus,
    BusError,
    DeadlineExceeded,
    Identity,
    KeyRing,
    Limits,
    Link,
    LinkClosed,
    PeerLost,
    PeerRefused,
    RemoteError,
    ZmqTransport,
    host_id,
    new_incarnation,
)
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.bus import SAID_GOODBYE
from cosmos_actor.bus.errors import SchemaError
from cosmos_actor.bus.handshake import KEY_NOT_LISTED, NO_CURVE, WRONG_SERVER_KEY
from cosmos_actor.bus.roster import STALE

from .checked import CheckedSession
from .messages import DRIVER, SIMULATOR, Attach, Attached, Detach, Reset, Step, Stepped
from .pace import Pace
from .squeezed import NONE, ZLIB, squeezed
from .step_lane import ServedSteps, open_lane

OVER, FAILED, MISTAKE, TOO_LARGE = 0, 1, 2, 3
"""Exit codes: the run is over or it was asked to leave; it may go well another time; only a person can put it right; it
had grown past its memory."""
DIAL_S = 4.0
"""For one attempt to reach the driver: a wrong key is told within 5 s."""
ANSWER_S = 20.0
"""For the driver's answer to an offer: it may be loading its model."""
PAUSE_S = 0.5
"""Between a life that ended and the next one."""
DETACH_S = 2.0
KNOCK_S = 2.0
"""For a connection to the door of a driver that has said goodbye."""
WATCH_EVERY_S = 1.0
"""Between two words of the loop that it turns."""
MEMORY_EVERY_S = 1.0
"""Between two looks at the process's memory; a look costs as much as a step of a small simulator."""
MESSAGE_BYTES = 32 << 20
"""What is taken and sent in one message where both sides allow it: the images of some dozen slots, between hosts."""
SUPERSEDED = "superseded by incarnation"


class Ending(NamedTuple):
    """Why a process of a simulator ends."""

    code: int
    line: str


@dataclass(frozen=True)
class Place:
    """Where a simulator attaches, and as whom."""

    address: str
    name: str
    keys: KeyRing
    rejoin_s: float
    """How long a driver that can not be reached is looked for."""
    max_memory_bytes: int = 0
    """Resident size after which it leaves; 0: none."""


class SimulatorServer:
    """Keeps one session attached to its driver. `run` returns when that is over for good; it raises no BusError."""

    def __init__(self, session: CheckedSession, offer: Attach, place: Place, pace: Pace, *,
                 say: Callable[[str], None], transport: Callable[[], Any] = ZmqTransport) -> None:
        self._session, self._offer, self._place, self._say = session, offer, place, say
        self._transport = transport
        self._bus: Optional[Bus] = None
        self._asked: Optional[Ending] = None
        self._looked = 0.0
        self._watching: Optional[asyncio.TimerHandle] = None
        self._farewell = ""
        """What the driver said when it went; a run that goes on keeps its door open for the next one."""
        self.lives = 0
        self._squeeze = NONE
        pace.declare, pace.beat = self._declare, self._beat

    async def run(self) -> Ending:
        """Serve, through as many lives as it takes."""
        self._loop = asyncio.get_running_loop()
        try:
            return await self._live()
        finally:
            self._watch(0.0)

    async def _live(self) -> Ending:
        self._leaving = asyncio.Event()
        until = self._loop.time() + self._place.rejoin_s
        reason, told = "", False
        while self._asked is None:
            try:
                reason = await self._until_asked(self._life())
                until, told = self._loop.time() + self._place.rejoin_s, False
                self._farewell = reason if reason.startswith(SAID_GOODBYE) else ""
            except BusError as error:
                reason = str(error)
                ending = final(error, self._place, attached=self.lives > 0)
                if ending is not None:
                    return ending
            if self._asked is None:
                ending = after(reason, self._place)
                if ending is not None:
                    return ending
                if self._farewell and not await self._loop.run_in_executor(None, listens, self._place.address):
                    return Ending(OVER, "the run is over: {}".format(self._farewell))
                if self._loop.time() >= until:
                    return Ending(FAILED, reason)
                if not told:
                    self._say("{}: {}; trying for {:g} s".format(self._place.name, reason, self._place.rejoin_s))
                    told = True
                await self._until_asked(asyncio.sleep(PAUSE_S))
        return self._asked

    def leave(self, ending: Ending) -> None:
        """Detach and end. The first reason counts."""
        if self._asked is None:
            self._asked = ending
            self._leaving.set()

    # ---- one life

    async def _until_asked(self, doing: Any) -> str:
        """The result of it, or "" when it was asked to leave before; it is cancelled then."""
        task = asyncio.ensure_future(doing)
        asked = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
            return str(task.result()) if task.done() else ""
        finally:
            for one in (task, asked):
                one.cancel()
            await asyncio.wait([task, asked])

    async def _life(self) -> str:
        """Attach and serve; the reason why the link was lost. Raises BusError where it came to no link."""
        place = self._place
        bus = Bus(Identity(place.keys.run_id, SIMULATOR, place.name, new_incarnation()), self._transport(), place.keys,
                  limits=Limits(max_message_bytes=MESSAGE_BYTES), bulk=BulkSettings())
        taken_in, over = asyncio.Event(), self._loop.create_future()

        async def on_reset(request: Reset, link: Link) -> Stepped:
            await taken_in.wait()  # whether its slots are as they were is known only then
            return self._sent(request, link)

        bus.serve(Reset, on_reset)
        bus.serve(Step, self._sent)
        bus.on_link_down(lambda link, reason: over.done() or over.set_result(reason))
        await bus.start(None)
        self._bus = bus
        link: Optional[Link] = None
        lane: Optional[ServedSteps] = None
        try:
            link = await bus.connect(place.address, role=DRIVER, deadline_s=DIAL_S)
            lane = self._lane(bus, link)
            attached = await self._attach(link, lane)
            self._took_us_in(attached, link)
            taken_in.set()
            if lane is not None:
                open_lane(lane, attached.steps)
            return str(await over)
        finally:
            self._bus = None
            if lane is not None:
                lane.close()
            if self._asked is not None and link is not None and taken_in.is_set():
                await self._detach(link, self._asked.line)
            await bus.close(drain_s=0.0)

    async def _attach(self, link: Link, lane: Optional[ServedSteps]) -> Attached:
        self._fits(link)
        offer = replace(self._offer, steps=None if lane is None else lane.offer())
        return await link.call(offer, deadline_s=ANSWER_S)  # type: ignore[no-any-return]

    def _lane(self, bus: Bus, link: Link) -> Optional[ServedSteps]:
        """To a driver of this host."""
        if not link.sharing.has_lane:
            return None
        try:
            return ServedSteps(self._offer.description, self._offer.envs, self._answer, bus.busy_poll)
        except BusError:
            return None

    def _took_us_in(self, attached: Attached, link: Link) -> None:
        if not attached.resumed:
            self._session.forget()
        self.lives += 1
        self._squeeze = attached.squeeze
        self._watch(attached.deadline_s)
        self._say("{}: {} to {} at {}, {} slots of {}".format(
            self._place.name, "back" if attached.resumed else "attached", link.peer.actor, self._place.address,
            self._offer.envs, self._offer.description.simulator))

    def _watch(self, deadline_s: float) -> None:
        """From now on a loop that does not turn for so long ends the process, also where the interpreter is locked.

        A simulator that hangs is of no use to anybody, and whoever started it can start another.
        """
        if self._watching is not None:
            self._watching.cancel()
        if deadline_s <= 0:
            faulthandler.cancel_dump_traceback_later()
            return
        faulthandler.dump_traceback_later(deadline_s, exit=True)
        self._watching = self._loop.call_later(min(WATCH_EVERY_S, deadline_s / 4), self._watch, deadline_s)

    def _fits(self, link: Link) -> None:
        """Arrays of any size go to a driver of this host. To another host all slots' observations are one message."""
        specs = self._offer.description.observations.values()
        nbytes = 2 * self._offer.envs * sum(int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize for spec in specs)
        if link.host_id != host_id() and nbytes > link.out.max_bytes:
            raise TooMuch(nbytes, link.out.max_bytes)

    async def _detach(self, link: Link, reason: str) -> None:
        try:
            await link.call(Detach(reason), deadline_s=DETACH_S)
        except BusError:
            pass  # it is gone itself, and finds out by the end of the link

    # ---- requests

    def _sent(self, request: Any, link: Link) -> Stepped:
        """The answer as it travels."""
        stepped = self._answer(request)
        if self._squeeze != ZLIB or link.host_id == host_id():
            return stepped
        return squeezed(stepped, self._offer.description.observations)

    def _answer(self, request: Any) -> Stepped:
        stepped = self._session.answer(request)
        if self._bus is not None:
            self._bus.progress += 1
        if self._place.max_memory_bytes:
            self._look_at_memory()
        return stepped

    def _look_at_memory(self) -> None:
        now = time.monotonic()
        if now - self._looked < MEMORY_EVERY_S:
            return
        self._looked = now
        held = resident_bytes()
        if held > self._place.max_memory_bytes:
            self.leave(Ending(TOO_LARGE, "it holds {} MB of memory, --max-memory-mb (sim.max_memory_mb) is {}".format(
                held >> 20, self._place.max_memory_bytes >> 20)))

    def _declare(self, label: str, expected_s: float) -> None:
        if self._bus is not None:
            self._bus.declare_busy(label, expected_s)

    def _beat(self) -> None:
        if self._bus is not None:
            self._bus.beat()


class TooMuch(BusError):
    """What the simulator sees does not fit into a message to this driver."""

    def __init__(self, nbytes: int, limit: int) -> None:
        super().__init__("what its slots see is up to {:.1f} MB in one message, and the driver, on another host, takes "
                         "{:.1f}: raise its bus.max_message_bytes or lower --envs".format(nbytes / 1e6, limit / 1e6))


def final(error: BusError, place: Place, *, attached: bool) -> Optional[Ending]:
    """How it ends after this error of an attempt to attach; None: it may pass. `attached`: whether it has been before.

    After that another process at the driver's address may be one that took its port, and goes.
    """
    if isinstance(error, (DeadlineExceeded, LinkClosed)):
        return None
    if isinstance(error, PeerLost):
        return after(error.reason, place)
    if isinstance(error, RemoteError) and error.kind == "AttachRefused":
        return Ending(MISTAKE, "{} refuses it: {}".format(place.address, error.remote_text))
    if isinstance(error, (RemoteError, SchemaError)):
        text = getattr(error, "remote_text", error)
        return Ending(MISTAKE, "{} drives no simulators: {}".format(place.address, text))
    if isinstance(error, PeerRefused):
        if error.reason.startswith(STALE) or (attached and error.reason.startswith((WRONG_SERVER_KEY, NO_CURVE))):
            return after(error.reason, place)
        if error.reason.startswith((KEY_NOT_LISTED, WRONG_SERVER_KEY)):
            return Ending(MISTAKE, "--key is not of the run behind {}: {}".format(place.address, error.reason))
        return Ending(MISTAKE, error.reason)
    return Ending(MISTAKE, str(error))


def after(reason: str, place: Place) -> Optional[Ending]:
    """How it ends when the link is over for this reason; None: the driver may be back."""
    if SUPERSEDED in reason:
        return Ending(MISTAKE, "another process has attached as {}: give each its own --name".format(place.name))
    return None


def listens(address: str) -> bool:
    """Whether anybody takes connections there. Without one after a goodbye the run is over, not its driver alone."""
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S):
            return True
    except (OSError, ValueError):
        return False


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
