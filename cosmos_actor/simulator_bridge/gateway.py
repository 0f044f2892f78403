"""Where simulators attach: the driver's end of the bridge, on the bus of the actor that drives them.

A simulator whose link is lost keeps its place for `resume_s`: what it was doing is asked again when it is back, and the
number of a request makes sure that nothing is done twice. After that it is gone; it may attach again at any time.
"""

from __future__ import annotations

import asyncio
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from cosmos_actor.bus import Bus, BusError, DeadlineExceeded, Link, LinkClosed, PeerLost, RemoteError

from .contract import Description, SimulatorError
from .messages import SIMULATOR, Assignment, Attach, Attached, Detach, Reset, Step, Stepped
from .squeezed import NONE, BadSqueeze, unsqueezed
from .step_lane import AskedSteps, asked_steps

LOOK_S = 0.5
"""Between two looks at who is silent."""


class AttachRefused(Exception):
    """This simulator may not work for this run. Its text is the line that the simulator's user reads."""


class AttachedSimulator:
    """One simulator's session. One request at a time; its failures are SimulatorError and nothing else."""

    def __init__(self, name: str, offer: Attach, link: Link, resume_s: float, bus_clock: Callable[[], float]) -> None:
        self.name, self.offer = name, offer
        self._bus_clock = bus_clock
        self.description: Description = offer.description
        self.slots = list(range(offer.envs))
        self.gone = ""
        """Why it is not here any more; empty while it is."""
        self.left = False
        """It went by its own will: what it was doing is nobody's fault."""
        self.alone = False
        """No other simulator is here."""
        self.doing = ""
        """What it was asked for and has not answered."""
        self._now = asyncio.get_running_loop().time
        self._since = self._cut_off_at = self._now()
        self._link: Optional[Link] = link
        self._lane: Optional[AskedSteps] = None
        self._resume_s = resume_s
        self._back = asyncio.Event()
        self._number = 0
        self._turn = asyncio.Lock()
        self._counts = {"requests": 0, "past_the_bus": 0, "resumed": 0, "seconds": 0.0, "steps": 0}

    @property
    def link(self) -> Optional[Link]:
        """None while it is cut off."""
        return self._link

    async def reset(self, assignments: Sequence[Assignment], *, deadline_s: float,
                    queue: Sequence[Assignment] = ()) -> Stepped:
        """Begin these units; the first observations."""
        return await self._ask(Reset, "reset", deadline_s, list(assignments), list(queue))

    async def step(self, slots: Sequence[int], actions: np.ndarray, *, deadline_s: float,
                   queue: Sequence[Assignment] = (), intermediate: bool = False) -> Stepped:
        """A chunk `actions` [n, K, …] for `slots`."""
        where = None if slots == self.slots else np.asarray(slots, np.int32)
        stepped = await self._ask(Step, "step", deadline_s, actions, where, list(queue), intermediate)
        rewards = stepped.rewards
        self._counts["steps"] += rewards.size if rewards.shape[1] == 1 else int(stepped.steps.sum())
        return stepped

    def statistics(self) -> Dict[str, Any]:
        return {**self._counts, "simulator": self.description.simulator, "envs": len(self.slots), "doing": self.doing,
                "host": self.offer.host, "pid": self.offer.pid, "python": self.offer.python, "gone": self.gone,
                "cut_off": self._link is None}

    def facts(self) -> Dict[str, Any]:
        """For whoever looks at the run; times in seconds."""
        now = self._now()
        return {"actor": self.name, "role": SIMULATOR, "life": self.offer.life, "simulator": self.description.simulator,
                "envs": len(self.slots), "steps": self._counts["steps"], "doing": self.doing,
                "for_s": round(now - self._since, 2), "silent_s": round(self._silent_s(now), 2),
                "host": self.offer.host, "pid": self.offer.pid, "python": self.offer.python}

    def _silent_s(self, now: float) -> float:
        if self._link is None:
            return now - self._cut_off_at
        return self.unexcused_s()

    def unexcused_s(self) -> float:
        """Without a word and without a declared pause, over the link that there is."""
        if self._link is None:
            return 0.0
        now = self._bus_clock()
        self._link.liveness.look(now)
        return float(self._link.liveness.unexcused_s(now))

    # ---- for the gateway

    def lend_lane(self, lane: Optional[AskedSteps]) -> None:
        """Steps take it as long as this link lasts."""
        self._close_lane()
        self._lane = lane

    def _close_lane(self) -> None:
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def cut_off(self, link: Link) -> None:
        """That link is over; it may come back."""
        if self._link is link:
            self._link = None
            self._close_lane()
            self._cut_off_at = self._now()
            self._back.clear()

    def come_back(self, link: Link) -> None:
        self._link = link
        self._counts["resumed"] += 1
        self._back.set()

    def end(self, reason: str) -> None:
        """For good: whoever waits for it hears why."""
        if not self.gone:
            self.gone = reason
        self._link = None
        self._close_lane()
        self._back.set()

    # ---- one request

    async def _ask(self, kind: Any, what: str, deadline_s: float, *fields: Any) -> Stepped:
        async with self._turn:
            self._number += 1
            self._counts["requests"] += 1
            now = self._now
            self.doing, self._since = what, now()
            try:
                stepped = await self._answer(kind(self._number, *fields), what, self._since + deadline_s)
            finally:
                self.doing, self._since = "", now()
            if self.gone:  # since it answered: what its slots held is with others by now
                raise self._lost()
            self._counts["seconds"] += stepped.seconds
            return stepped

    async def _answer(self, message: Any, what: str, until: float) -> Stepped:
        """Over this link or the next one."""
        lane = self._lane if type(message) is Step else None
        while True:
            link = self._link or await self._next_link()
            try:
                if lane is not None:
                    asked, lane = lane.ask(message, until, self.alone), None
                    stepped = None if asked is None else await asked
                    if stepped is not None:
                        self._counts["past_the_bus"] += 1
                        link.liveness.heard(self._bus_clock())
                        return stepped  # type: ignore[no-any-return]
                    continue  # the link may have ended meanwhile
                left = until - self._now()
                if left > 0:
                    return unsqueezed(await link.call(message, deadline_s=left), self.description.observations)
                raise DeadlineExceeded("no answer")
            except (PeerLost, LinkClosed):
                self.cut_off(link)
            except DeadlineExceeded as error:
                raise SimulatorError("hang", "{} has not answered {} within its deadline".format(self, what)) from error
            except BadSqueeze as error:
                raise SimulatorError("shape", "{}: {}".format(self, error)) from error
            except RemoteError as error:
                raise SimulatorError(what, "{}: {}".format(self, error.remote_text)) from error
            except BusError as error:
                raise SimulatorError(what, "{}: {}".format(self, error)) from error

    async def _next_link(self) -> Link:
        back = asyncio.ensure_future(self._back.wait())
        try:
            await asyncio.wait([back], timeout=self._resume_s)  # `wait_for` may take a cancellation for its return
        finally:
            back.cancel()
        if self._link is None:
            raise self._lost()
        return self._link

    def _lost(self) -> SimulatorError:
        return SimulatorError("lost", "{} is gone: {}".format(
            self, self.gone or "it has not come back within {:g} s".format(self._resume_s)))

    def __str__(self) -> str:
        return "{} ({})".format(self.name, self.description.simulator)


class Gateway:
    """Takes simulators in and tells the driver who is here."""

    def __init__(self, bus: Bus, *, resume_s: float, silent_s: float, deadline_s: float = 0.0,
                 squeeze: str = NONE) -> None:
        """To be made before the bus starts. `silent_s`: how long one may give no heartbeat and declare no pause;
        `deadline_s`, `squeeze`: see Attached."""
        self._bus, self._silent_s, self._squeeze = bus, silent_s, squeeze
        self._looking: Optional[asyncio.TimerHandle] = None
        self._admit: Callable[[str, Attach], Optional[str]] = lambda actor, offer: None
        self._resume_s, self._deadline_s = resume_s, deadline_s
        self._present: Dict[str, AttachedSimulator] = {}
        self._attached: List[Callable[[AttachedSimulator], None]] = []
        self._gone: List[Callable[[AttachedSimulator], None]] = []
        self._counts = {"attached": 0, "resumed": 0, "refused": 0, "lost": 0, "left": 0}
        bus.serve(Attach, self._attach)
        bus.serve(Detach, self._detach)
        bus.on_link_down(self._link_down)

    def admit_by(self, rule: Callable[[str, Attach], Optional[str]]) -> None:
        """`rule(actor, offer)` says in one line why this simulator is refused, or None."""
        self._admit = rule

    def on_attached(self, callback: Callable[[AttachedSimulator], None]) -> None:
        """Called for each that comes, on the loop; not for one that resumes."""
        self._attached.append(callback)

    def on_gone(self, callback: Callable[[AttachedSimulator], None]) -> None:
        self._gone.append(callback)

    @property
    def present(self) -> List[AttachedSimulator]:
        """By name."""
        return [self._present[name] for name in sorted(self._present)]

    def dismiss(self, simulator: AttachedSimulator, reason: str) -> None:
        """It is not relied on any more: its link is ended, and it may attach anew when it can."""
        link = simulator.link
        self._end(simulator, reason)
        if link is not None:
            self._bus.forget(link.peer.actor, link.peer.incarnation, reason)

    def facts(self) -> List[Dict[str, Any]]:
        """Who is here, for `status` and for the supervisor that started it."""
        return [one.facts() for one in self.present]

    def statistics(self) -> Dict[str, Any]:
        return {**self._counts, "present": {name: one.statistics() for name, one in self._present.items()}}

    def _attach(self, offer: Attach, link: Link) -> Attached:
        if link.peer.role != SIMULATOR:
            raise AttachRefused("only a {} can attach, not a {}".format(SIMULATOR, link.peer.role))
        known = self._present.get(link.peer.actor)
        if known is not None and known.offer.session == offer.session:
            known.come_back(link)
            self._counts["resumed"] += 1
            return self._taken_in(known, offer, link, resumed=True)
        refusal = self._admit(link.peer.actor, offer)
        if refusal:
            self._counts["refused"] += 1
            raise AttachRefused(refusal)
        if known is not None:
            self._end(known, "another process has attached under its name")
        simulator = AttachedSimulator(link.peer.actor, offer, link, self._resume_s, self._bus.clock.now)
        self._present[simulator.name] = simulator
        self._counts["attached"] += 1
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        asyncio.get_running_loop().call_soon(self._tell, self._attached, simulator)  # it is to hear first that it is in
        return self._taken_in(simulator, offer, link, resumed=False)

    def _taken_in(self, simulator: AttachedSimulator, offer: Attach, link: Link, *, resumed: bool) -> Attached:
        lane = asked_steps(offer, self._bus.busy_poll) if link.sharing.has_lane else None
        simulator.lend_lane(lane)
        self._count_present()
        return Attached(self._bus.identity.actor, resumed, self._deadline_s, None if lane is None else lane.offer(),
                        self._squeeze)

    def _count_present(self) -> None:
        for one in self._present.values():
            one.alone = len(self._present) == 1

    def _look(self) -> None:
        """A process that is stopped keeps its link for long; what it was doing is to go on elsewhere before."""
        for simulator in self.present:
            silent_s = simulator.unexcused_s()
            if silent_s >= self._silent_s:
                self._counts["lost"] += 1
                self.dismiss(simulator, "no heartbeat for {:.1f} s".format(silent_s))
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look) if self._present else None

    def _detach(self, farewell: Detach, link: Link) -> None:
        simulator = self._present.get(link.peer.actor)
        if simulator is not None and simulator.link is link:
            self._counts["left"] += 1
            simulator.left = True
            self._end(simulator, "it left: {}".format(farewell.reason))

    def _link_down(self, link: Link, reason: str) -> None:
        simulator = self._present.get(link.peer.actor)
        if simulator is not None and simulator.link is link:
            simulator.cut_off(link)
            asyncio.get_running_loop().call_later(self._resume_s, self._give_up, simulator, reason)

    def _give_up(self, simulator: AttachedSimulator, reason: str) -> None:
        if simulator.link is None and not simulator.gone:
            self._counts["lost"] += 1
            self._end(simulator, reason)

    def _end(self, simulator: AttachedSimulator, reason: str) -> None:
        if self._present.get(simulator.name) is simulator:
            del self._present[simulator.name]
            self._count_present()
        if not simulator.gone:
            simulator.end(reason)
            self._tell(self._gone, simulator)

    @staticmethod
    def _tell(callbacks: Sequence[Callable[[AttachedSimulator], None]], simulator: AttachedSimulator) -> None:
        for callback in callbacks:
            callback(simulator)
