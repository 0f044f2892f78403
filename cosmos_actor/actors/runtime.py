"""One actor's life on the bus: dial the head, learn the settings, announce itself, serve its role, leave.

    dialling -> starting (announced; `setup` runs) -> ready -> leaving (no new work) -> stopped
                                                   `-> failed (setup raised, or the head is lost)

A head that is restarted is dialled anew, and its actors work on meanwhile: they need it for news only.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from cosmos_actor.actors.context import ActorClock, Context, WeightSource
from cosmos_actor.actors.examined import serve_examination
from cosmos_actor.actors.in_hand import SHOWN
from cosmos_actor.actors.messages import (
    DIALLING,
    FAILED,
    LEAVING,
    MEMBERSHIP_TOPIC,
    READY,
    STARTING,
    STATUS_TOPIC,
    ActorStatus,
    Announce,
    Leaving,
    Membership,
    StopActor,
)
from cosmos_actor.actors.role import Role
from cosmos_actor.actors.role_names import REGISTRY
from cosmos_actor.actors.worker import Worker
from cosmos_actor.bus import Bus, BusError, Link, MessageTooLarge, PeerRefused, SchemaError, schema_key
from cosmos_actor.bus.bus import SAID_GOODBYE
from cosmos_actor.bus.handshake import NO_CURVE, WRONG_SERVER_KEY
from cosmos_actor.bus.roster import STALE
from cosmos_actor.bus.waits import held, under_way

STATUS_PERIOD_S = 1.0
"""Period of an actor's status. Longer, and `status` shows a past that is over."""
LOOK_S = 0.25
"""How often the loop looks at what the worker does. Rarer, and a blocked handler is not found within 3 s."""
BLOCKED_S = 2.5
"""A computation without progress and without use of a CPU for so long is reported as blocked."""
DECLARE_DEADLINE_S = 1.0
"""How long a worker waits until its loop has told the peers of a pause; one that does not turn must not hold it."""
HEAD_DEADLINE_S = 20.0
"""How long an actor tries to reach its head before it gives up and says so."""
HEAD_BACK_S = 30.0
"""How long an actor goes on without a head that is gone, trying to reach its successor. One that has a supervisor may
try for as long as a start takes: it ends with that one anyway."""
HEAD_DIAL_S, HEAD_PAUSE_S = 5.0, 0.2
"""One attempt to reach it, and the pause before the next."""
TURN_DEADLINE_S = 30.0
"""How long a setup leaves the processors to one that the job needs earlier."""
LEAVE_DEADLINE_S = 60.0
"""How long a leaving actor may finish what it holds."""
HEAD_GONE = "the head of the run is gone"
"""How the reason of an actor that lost its head begins."""
CLOSE_DEADLINE_S = 3.0
"""How long a role may take to close. It comes after what the worker computes, and that may be minutes of sampling."""


class HeadLost(BusError):
    """The run's head is gone, so this actor ends. `final`: it said itself that the run is over, or that it has no place
    for us."""

    final = False


class ActorRuntime:
    """Runs one role on one bus. Guarantee: no message reaches the role before `setup` returned, none after `close`."""

    def __init__(self, bus: Bus, build_role: Callable[[Context], Role], settings: Any, seed: int, *, worker: Worker,
                 clock: ActorClock, weights: WeightSource | None = None, simulators: Any = None,
                 joined: bool = False, takes_turns: bool = False, blocked_s: float = BLOCKED_S,
                 head_back_s: float = HEAD_BACK_S) -> None:
        self.bus = bus
        self.state = DIALLING
        self.context = Context(bus.identity, settings, seed=seed, clock=clock, worker=worker, weights=weights,
                               bulk_store=bus.bulk_store, simulators=simulators, emit=self._emit,
                               pauses_changed=self._pauses_changed, takes_turns=takes_turns)
        self.role = build_role(self.context)
        self.stopped = asyncio.Event()
        self.failure: BaseException | None = None
        self.asked_to_end = ""
        """Why, if somebody said so."""
        self.questions: Callable[[], list[dict[str, Any]]] = list
        """What the controller has asked and not been answered, for `why`."""
        self._blocked_s, self._blocked = blocked_s, False
        self._loop: asyncio.AbstractEventLoop
        self._loop_thread = 0
        self._worker = worker
        self._joined = joined
        self._ready = asyncio.Event()
        self._turn = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving = 0
        self._head: Link
        self._announce: Announce
        self._head_address = ""
        self._head_back_s = head_back_s
        self._seeking = False
        """Whether a successor of the head is looked for."""
        self._serve()

    async def start(self, head_address: str, listen: str) -> None:
        """Return once the head knows this actor. `begin` is to follow."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        address = await self.bus.start(listen)
        self._announce = Announce(address=address, pid=os.getpid(), python=sys.executable, host=socket.gethostname(),
                                  joined=self._joined)
        self._head_address = head_address
        self._head = await self.bus.connect(head_address, role=REGISTRY, deadline_s=HEAD_DEADLINE_S)
        self.bus.on_link_down(self._link_down)
        self.state = STARTING
        await self.tell_head(self._announce, deadline_s=HEAD_DEADLINE_S)
        self._spawn(self._report())

    async def tell_head(self, message: Any, *, deadline_s: float) -> Any:
        """Its answer; of the next head, if this one is lost before it gave one. Raises what the last attempt did."""
        until = self._loop.time() + deadline_s
        while True:
            head = self._head
            try:
                return await head.call(message, deadline_s=max(0.001, until - self._loop.time()))
            except BusError as error:
                if self.stopped.is_set():
                    raise self.failure or error from error
                if isinstance(error, (MessageTooLarge, SchemaError)) or self._loop.time() + HEAD_PAUSE_S > until:
                    raise
                if head.lost is not None:
                    self._link_down(head, head.lost)  # its word may have come before there was anybody to hear it
                await asyncio.sleep(HEAD_PAUSE_S)

    def begin(self) -> None:
        """Run the role's `setup` behind, and then serve."""
        self._spawn(self._set_up())

    async def until_stopped(self) -> None:
        """Wait for the end of this actor. Raises what ended it, unless it was asked to."""
        await self.stopped.wait()
        if self.failure is not None:
            raise self.failure

    async def leave(self, reason: str) -> None:
        """Take no new work, finish what is held (bounded), and end."""
        if self.state == LEAVING or self.stopped.is_set():
            return
        self.state = LEAVING
        try:
            await self.tell_head(Leaving(reason), deadline_s=5.0)
        except BusError:
            pass  # it is asked for nothing new once its link is gone
        try:
            await asyncio.wait_for(self._idle(), LEAVE_DEADLINE_S)
        except asyncio.TimeoutError:
            pass  # an overlong answer must not keep an actor that wants to go
        self.end()

    async def close(self) -> None:
        """Close the role, unless it is still computing after `CLOSE_DEADLINE_S`, and the bus. The process ends then."""
        self.end()
        for task in list(self._tasks):
            task.cancel()
        if self._ready.is_set():
            try:
                await asyncio.wait_for(self._worker.run(self.role.close), CLOSE_DEADLINE_S)
            except asyncio.TimeoutError:
                pass  # the process ends in the middle of that computation
        self._worker.close()
        await self.bus.close(drain_s=1.0)

    def _serve(self) -> None:
        for message_type, method, concurrency in self.role.handlers():
            name = schema_key(message_type)[0]
            self.bus.serve(message_type, self._guarded(method, name), concurrency=concurrency)
        for topic, method in self.role.followers():
            self.bus.serve_state(topic, self._guarded(method, topic))
        self.bus.serve(StopActor, self._stop_asked)
        serve_examination(self.bus, self.context.clock.wall)
        if self.role.setup_after:
            self.bus.serve_state(MEMBERSHIP_TOPIC, self._on_membership)

    async def _emit(self, message: Any) -> None:
        """To whoever controls: normally one link, none while the controller restarts (it asks anew when it is back)."""
        for link in list(self.bus.links.values()):
            if link.peer.role == "controller":
                await link.emit(message)

    def _guarded(self, method: Callable[..., Any], name: str) -> Callable[[Any, Link], Any]:
        """The role's method as a bus handler: waits for `setup`, runs plain methods in the worker."""
        label = getattr(method, "__name__", "work")

        async def handle(message: Any, link: Link) -> Any:
            await self._ready.wait()
            self._serving += 1
            try:
                with self.context.in_hand.message(name, link.peer.actor):
                    if inspect.iscoroutinefunction(method):
                        return await method(message)
                    return await self.context.compute(label, method, message)
            finally:
                self._serving -= 1

        return handle

    async def _set_up(self) -> None:
        try:
            await self._wait_for_turn()
            await self.context.compute("setup", self.role.setup)
        except Exception as error:  # any failure of a role's start ends the actor, with that failure as its reason
            self.state = FAILED
            self.end(error)
            return
        if self.state == STARTING:
            self.state = READY
        self._ready.set()
        self._publish_status()

    async def _report(self) -> None:
        """Every second, and at once when the worker blocks or goes on."""
        said = float("-inf")
        while True:
            in_hand, now = self.context.in_hand, time.monotonic()
            in_hand.look(time.process_time() - time.thread_time())
            blocked = in_hand.blocked_s() >= self._blocked_s
            if blocked is not self._blocked or now - said >= STATUS_PERIOD_S:
                self._blocked, said = blocked, now
                self._publish_status()
            await asyncio.sleep(LOOK_S)

    async def _wait_for_turn(self) -> None:
        """Until the role that `setup_after` names is ready; a slow one does not hold this one up for ever."""
        if self.role.setup_after:
            try:
                await asyncio.wait_for(self._turn.wait(), TURN_DEADLINE_S)
            except asyncio.TimeoutError:
                pass

    def _on_membership(self, membership: Membership, link: Link) -> None:
        if any(member.role == self.role.setup_after and member.ready for member in membership.members):
            self._turn.set()

    def _publish_status(self) -> None:
        context = self.context
        self.bus.progress = context.progress
        self._head.publish_state(topic=STATUS_TOPIC, message=ActorStatus(
            state=self.state, progress=context.progress, busy_label=context.busy_label,
            busy_seconds=context.busy_seconds, weights_held=self.role.weights_held() if self._ready.is_set() else "",
            statistics=self._facts()))

    def _facts(self) -> dict[str, Any]:
        """What it does and for whom it waits; `actors/wait_graph.py` reads it."""
        facts = {**self.context.in_hand.facts(), "blocked": self._blocked, "holds": held(self.bus),
                 "under_way": under_way(self.bus)[:SHOWN], "questions": self.questions()[:SHOWN],
                 "simulators": [] if self.context.simulators is None else self.context.simulators.facts()}
        if self._ready.is_set():
            facts["weights"] = self.role.weights_proof()
        return {name: value for name, value in facts.items() if value}

    def _pauses_changed(self) -> None:
        """Tell the peers, from whichever thread; they know when this returns, unless the loop does not turn."""
        if threading.get_ident() == self._loop_thread:
            self._declare_pause(None)
            return
        told = threading.Event()
        self._loop.call_soon_threadsafe(self._declare_pause, told)
        told.wait(DECLARE_DEADLINE_S)

    def _declare_pause(self, told: threading.Event | None) -> None:
        self.bus.declare_busy(*self.context.in_hand.paused())
        self._publish_status()
        if told is not None:
            told.set()

    async def _stop_asked(self, message: StopActor, link: Link) -> None:
        self.asked_to_end = message.reason
        self.end()

    async def _idle(self) -> None:
        """Nothing asked and nothing running for a moment, so that answers on the wire have gone too."""
        quiet = 0
        while quiet < 3:
            quiet = quiet + 1 if self._serving == 0 else 0
            await asyncio.sleep(0.1)

    def _link_down(self, link: Link, reason: str) -> None:
        if link is not self._head or self._seeking or self.stopped.is_set():
            return
        if reason.startswith(SAID_GOODBYE):
            self._lose_head(reason, final=True)
        else:
            self._seeking = True
            self._spawn(self._next_head(reason))

    async def _next_head(self, reason: str) -> None:
        """Back to the head's address until one answers there that takes us."""
        until = self._loop.time() + self._head_back_s
        while self._loop.time() < until and not self.stopped.is_set():
            try:
                if self._head.lost is not None:
                    self._head = await self.bus.connect(self._head_address, role=REGISTRY, deadline_s=HEAD_DIAL_S)
                await self._head.call(self._announce, deadline_s=HEAD_DIAL_S)
                if self._head.lost is None:
                    self._seeking = False
                    self._publish_status()
                    return
            except BusError as error:
                if isinstance(error, PeerRefused) and not error.reason.startswith((WRONG_SERVER_KEY, NO_CURVE)):
                    self._lose_head(error.reason, final=not error.reason.startswith(STALE))
                    return
            await asyncio.sleep(HEAD_PAUSE_S)
        self._lose_head(reason, final=False)

    def _lose_head(self, reason: str, *, final: bool) -> None:
        if self.state == LEAVING:
            return  # it finishes what it holds, which others wait for, and ends by itself
        lost = HeadLost(f"{HEAD_GONE}: {reason}")
        lost.final = final
        self.end(lost)

    def end(self, failure: BaseException | None = None) -> None:
        if self.failure is None and not self.stopped.is_set():
            self.failure = failure
        self.stopped.set()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
