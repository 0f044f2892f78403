"""One seed, one life of a small job on a bad network: a sender and receivers that crash and come back, and what must
hold.

The code under test is the bus itself, on its in-memory transport, with the faults that `up --faults` uses; only the
clock is another. A schedule is wholly determined by its seed.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cosmos_actor.bus import BulkGone, Bus, BusError, Identity, Limits, MemoryNetwork, MemoryTransport, PeerLost
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.clock import Clock
from cosmos_actor.bus.envelope import CALL, EVENT, WORK
from cosmos_actor.bus.faults import Faults, FaultyTransport
from tests.bus.messages import Inner, Number
from tests.simulation.virtual_loop import run

LIMIT_S = 900.0
"""Virtual: whatever is not done by then hangs."""

QUIET_S = 60.0
"""After the last fault everything must have settled within it."""

LIMITS = Limits(work_window_messages=6, call_window_messages=3, event_window_messages=5, lost_after_s=4.0,
                batch_messages=4, handshake_s=2.0)


CLOSED, SILENT, ZOMBIE = "closed", "silent", "zombie"
"""How a receiver dies: its kernel closes its connections; its host loses power; it was only stopped, and wakes."""


BUDGET_BYTES = 64 * 1024
"""Room for 16 arrays: a leak of leases stops everything."""


def array_of(number: int) -> Inner:
    return Inner(np.full(100, number, np.float32))


class Violation(AssertionError):
    """A promise that did not hold."""


@dataclass
class Plan:
    """What the seed decided."""

    seed: int
    receivers: int
    work: int
    faults: Faults
    crashes: list[tuple[float, int, str]]
    """(when, which receiver, how)."""
    receivers_dial: bool
    arrays: bool
    """Work and answers carry arrays by reference: leases are lent, given back and freed."""
    sender_crashes: list[tuple[float, str]] = field(default_factory=list)
    """(when, how): the next life of the sender asks again for what was not answered."""

    @classmethod
    def of(cls, seed: int) -> Plan:
        draw = random.Random(seed)

        def rate(most: float) -> float:
            return draw.choice([0.0, 0.0, draw.uniform(0, most)])

        receivers = draw.randint(1, 3)
        faults = Faults(drop=rate(0.2), dup=rate(0.2), reorder=rate(0.2), corrupt=rate(0.03),
                        delay_s=draw.choice([0.0, 0.001, 0.05, 0.3]), seed=seed)
        receivers_dial = draw.random() < 0.5
        kinds = [CLOSED, CLOSED, SILENT, ZOMBIE if receivers_dial else CLOSED]
        crashes = sorted((draw.uniform(0, 6), draw.randrange(receivers), draw.choice(kinds))
                         for _ in range(draw.choice([0, 0, 1, 2, 4])))
        work, arrays = draw.randint(1, 16), draw.random() < 0.3
        sender_crashes = sorted((draw.uniform(0, 6), draw.choice([CLOSED, SILENT]))
                                for _ in range(draw.choice([0, 0, 0, 1, 2])))
        return cls(seed, receivers, work, faults, crashes, receivers_dial, arrays, sender_crashes)


class LoopClock(Clock):
    def now(self) -> float:  # type: ignore[override]
        return asyncio.get_running_loop().time()


class World:
    """The sender is `controller-0`; receivers are `rollout-N`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.random = random.Random(plan.seed ^ 0x5EED)
        self.network = MemoryNetwork()
        self.transports: list[FaultyTransport] = []
        self.handled: dict[int, int] = defaultdict(int)
        """Work -> handlers that ended, over all incarnations."""
        self.answered: dict[int, int] = {}
        self.lost: dict[int, int] = defaultdict(int)
        self.events: dict[tuple[str, str], list[int]] = defaultdict(list)
        self.sent_events: dict[tuple[str, str], int] = defaultdict(int)
        self.order: dict[tuple[str, str], list[int]] = defaultdict(list)
        self.buses: list[Bus] = []
        self.receivers: list[Bus] = []
        self.zombies: list[Bus] = []
        self.lives = 0
        self.forgotten: set[str] = set()
        self.violations: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.asking: dict[int, asyncio.Task[None]] = {}
        self.with_receiver: set[int] = set()
        """Work that the present sender has sent and that is not answered."""
        self.sender = self.bus("controller", "controller-0", serve=self._serve_sender)

    # -- actors

    def bus(self, role: str, actor: str, *, serve: Any) -> Bus:
        self.lives += 1
        transport = FaultyTransport(MemoryTransport(self.network), self.plan.faults)
        self.transports.append(transport)
        identity = Identity("run", role, actor, f"life{self.lives}")
        bus = Bus(identity, transport, None, limits=LIMITS, clock=LoopClock(),
                  bulk=BulkSettings(budget_bytes=BUDGET_BYTES, threshold_bytes=64) if self.plan.arrays else None)
        serve(bus)
        self.buses.append(bus)
        return bus

    def _serve_sender(self, bus: Bus) -> None:
        def event(message: Number, link: Any) -> None:
            self.events[str(link.peer), link.session].append(message.value)
            if link.peer.incarnation in self.forgotten:
                self.violations.append(f"an event of {link.peer}, which was given up")

        bus.serve_event(Number, event)

    def _serve_receiver(self, bus: Bus) -> None:
        incarnation = bus.identity.incarnation

        async def work(number: int, link: Any) -> int:
            order = self.order[incarnation, link.session]
            if number in order:
                self.violations.append(f"{bus.identity} handled {number} twice in one session")
            order.append(number)
            await asyncio.sleep(self.random.choice([0.0, 0.001, 0.02, 0.5]))
            if bus not in self.receivers and bus not in self.zombies:
                return -1  # it has crashed meanwhile: what a dead process does has no effect
            self.handled[number] += 1
            return number + 1

        async def plain(message: Number, link: Any) -> Number:
            return Number(await work(message.value, link))

        async def arrays(message: Inner, link: Any) -> Inner:
            number = int(message.steps[0])
            if not (message.steps == number).all():
                self.violations.append(f"the array of {number} has changed under its reader")
            return array_of(await work(number, link))

        bus.serve(Number, plain)
        bus.serve(Inner, arrays)

    # -- the life of the job

    async def live(self) -> None:
        sender_address = await self.sender.start("memory://controller-0")
        for index in range(self.plan.receivers):
            self.receivers.append(await self._start_receiver(index))
        self.tasks += [asyncio.ensure_future(self._keep_linked(index, sender_address))
                       for index in range(self.plan.receivers)]
        self.tellers = [asyncio.ensure_future(self._tell(index)) for index in range(self.plan.receivers)]
        crashes = [asyncio.ensure_future(self._crash()), asyncio.ensure_future(self._crash_sender())]
        self._ask()
        while len(self.answered) < self.plan.work:
            for task in [task for task in self.asking.values() if task.done() and not task.cancelled()]:
                task.result()
            await asyncio.sleep(0.05)
        for crash in crashes:
            await crash
        self._calm()
        await self._settle()
        self._judge()
        for task in self.tasks:
            task.cancel()
        for bus in [self.sender, *self.receivers, *self.zombies]:
            await bus.close(0)

    async def _start_receiver(self, index: int) -> Bus:
        bus = self.bus("rollout", f"rollout-{index}", serve=self._serve_receiver)
        # A zombie still has the address; where receivers can be zombies, nobody dials them.
        await bus.start("memory://" if self.plan.receivers_dial else f"memory://rollout-{index}")
        return bus

    async def _keep_linked(self, index: int, sender_address: str) -> None:
        """As actors do: who has no link dials again."""
        while True:
            dials, address, role, actor = self.sender, f"memory://rollout-{index}", "rollout", f"rollout-{index}"
            if self.plan.receivers_dial:
                dials, address, role, actor = self.receivers[index], sender_address, "controller", "controller-0"
            try:
                if actor not in dials.links:
                    await dials.connect(address, role=role, actor=actor, deadline_s=5)
            except BusError:
                pass
            await asyncio.sleep(0.1)

    async def _tell(self, index: int) -> None:
        """Events and state from each receiver to the sender."""
        for number in range(1, 10_000):
            bus = self.receivers[index]
            link = bus.links.get("controller-0")
            if link is not None:
                try:
                    bus.publish_state("progress", Number(number))
                    key = bus.identity.incarnation, link.session
                    await link.emit(Number(self.sent_events[key] + 1), deadline_s=20)
                    self.sent_events[key] += 1
                except BusError:
                    pass
            await asyncio.sleep(0.3)

    def _ask(self) -> None:
        """For all that is not answered."""
        self.asking = {number: asyncio.ensure_future(self._have_done(number)) for number in range(self.plan.work)
                       if number not in self.answered}

    async def _have_done(self, number: int) -> None:
        """Until one receiver has done it."""
        while number not in self.answered:
            links = [link for _, link in sorted(self.sender.links.items()) if link.role == "rollout"]
            if not links:
                await asyncio.sleep(0.05)
                continue
            link = links[number % len(links)]
            message: Any = array_of(number) if self.plan.arrays else Number(number)
            self.with_receiver.add(number)
            try:
                if number % 4 == 3:
                    answer = await link.call(message, deadline_s=LIMIT_S)
                else:
                    receipt = await link.send_work(message, deadline_s=LIMIT_S)
                    answer = await receipt.result(LIMIT_S)
            except (PeerLost, BulkGone):
                self.lost[number] += 1  # the peer, or the array that it lent, is gone
                continue
            finally:
                self.with_receiver.discard(number)
            value = int(answer.steps[0]) if self.plan.arrays else answer.value
            if value != number + 1:
                raise Violation(f"{number} was answered with {value}")
            if not self.handled[number]:
                raise Violation(f"{number} was done before any handler had ended")
            self.answered[number] = value

    async def _crash(self) -> None:
        begun = asyncio.get_running_loop().time()
        for when, index, how in self.plan.crashes:
            await asyncio.sleep(max(0.0, begun + when - asyncio.get_running_loop().time()))
            dead = self.receivers[index]
            if how == ZOMBIE:
                self.tasks.append(asyncio.ensure_future(self._wake_and_dial(dead, self.random.uniform(0.5, 6))))
            else:
                kill(dead, told=how == CLOSED)
            if how == ZOMBIE or (how == CLOSED and self.random.random() < 0.5):
                self.forgotten.add(dead.identity.incarnation)
                self.sender.forget(dead.identity.actor, dead.identity.incarnation, "given up")
            await asyncio.sleep(self.random.choice([0.0, 0.05, 1.0]))
            self.receivers[index] = await self._start_receiver(index)

    async def _crash_sender(self) -> None:
        begun = asyncio.get_running_loop().time()
        for when, how in self.plan.sender_crashes:
            await asyncio.sleep(max(0.0, begun + when - asyncio.get_running_loop().time()))
            kill(self.sender, told=how == CLOSED)
            for number in self.with_receiver:
                self.lost[number] += 1  # it may be done, or be being done, for nobody
            for task in self.asking.values():
                task.cancel()
            await asyncio.sleep(self.random.choice([0.0, 0.05, 1.0]))
            self.sender = self.bus("controller", "controller-0", serve=self._serve_sender)
            for index in range(self.plan.receivers):  # whoever starts a sender again tells it who is gone
                for incarnation in self.forgotten:
                    self.sender.forget(f"rollout-{index}", incarnation, "given up")
            await self.sender.start("memory://controller-0")
            self._ask()

    async def _wake_and_dial(self, zombie: Bus, after_s: float) -> None:
        """It was stopped, its place was given to another life, and it knows nothing of that."""
        now = asyncio.get_running_loop().time()
        zombie.transport._windows = [(now, now + after_s)]
        self.zombies.append(zombie)
        await asyncio.sleep(after_s)
        for number in range(100):
            try:
                link = await zombie.connect("memory://controller-0", role="controller", deadline_s=5)
                await link.emit(Number(1_000_000 + number), deadline_s=1)
            except BusError:
                pass
            await asyncio.sleep(0.2)

    # -- the end

    def _calm(self) -> None:
        for transport in self.transports:
            transport.faults = Faults()

    async def _settle(self) -> None:
        for task in self.tellers:
            task.cancel()
        loop = asyncio.get_running_loop()
        ends = loop.time() + QUIET_S
        while self._unsettled():
            if loop.time() > ends:
                raise Violation(f"not settled {QUIET_S:g} s after the last fault: {self._unsettled()}")
            await asyncio.sleep(0.25)

    def _unsettled(self) -> str:
        for bus in [self.sender, *self.receivers]:
            for link in bus.links.values():
                if link.out.under_way or link.incoming.running:
                    return f"{bus.identity} -> {link.peer}: {link.out.statistics()} {link.incoming.statistics()}"
        for index, bus in enumerate(self.receivers):
            link = self.sender.links.get(f"rollout-{index}")
            if link is None or link.peer.incarnation != bus.identity.incarnation:
                return f"{bus.identity} lives, the sender has {link}"
            published = bus._published.get("progress")
            if published is not None and link.states.get("progress") != published:
                return f"{bus.identity} has published {published}, the sender has {link.states}"
        for bus in [self.sender, *self.receivers]:
            bulk = None if bus.bulk is None else bus.bulk.statistics()
            if bulk is not None and (bulk["store"]["leases"] or bulk["loans"]["loans"]):
                return f"{bus.identity} still has arrays lent or borrowed: {bulk}"
        return ""

    def _judge(self) -> None:
        if self.violations:
            raise Violation(self.violations[0])
        for number in range(self.plan.work):
            most = 1 + self.lost[number]
            if not 1 <= self.handled[number] <= most:
                raise Violation(f"{number} was done {self.handled[number]} times, lost {self.lost[number]} times")
        for (peer, session), numbers in self.events.items():
            if numbers != list(range(1, len(numbers) + 1)):
                raise Violation(f"events of {peer} came as {numbers} in session {session[:8]}")
        for bus in [self.sender, *self.receivers]:
            for link in bus.links.values():
                for channel in (WORK, CALL, EVENT):
                    if link.out.credits[channel].used_messages:
                        raise Violation(f"{bus.identity} -> {link.peer}: credit leaked: {link.out.statistics()}")


def kill(bus: Bus, told: bool) -> None:
    """The process is gone between two instructions; `told`: its kernel closes its connections."""
    transport = bus.transport._inner
    transport.network.listeners.pop(transport.address, None)
    transport.owner = None
    for wire in transport.wires:
        if told:
            wire.cut()
        wire.open = False
    for link in bus.links.values():
        link.incoming.cancel()
    for dialler in list(bus.diallers):
        dialler.stop()
    if bus.bulk is not None:
        bus.bulk.close()
    if bus._ticker is not None:
        bus._ticker.cancel()
    bus._state = "closed"
    bus.links.clear()


def simulate(seed: int) -> World:
    """Run the schedule of this seed; Violation, or TimeoutError, says what did not hold."""
    made: list[World] = []

    async def life() -> None:
        world = World(Plan.of(seed))
        made.append(world)
        await world.live()

    gc.disable()  # what only a garbage collection would free is a leak for as long as none comes
    try:
        run(life(), limit_s=LIMIT_S)
    finally:
        gc.enable()
        for bus in made[0].buses:
            if bus.bulk is not None:
                bus.bulk.close()
    return made[0]
