"""A GPU that the policy and the rollouts of its host have in turn: the shell of job/turns.py. On the bus's loop.

    to the rollouts   policy parks -> each rollout wakes its weights, takes the newest version, wakes its cache
    to the policy     each rollout ends what is in flight and sleeps -> policy unparks

What a recipe asks for decides whose turn it is: an update, a snapshot or a checkpoint is the policy's, samples are the
rollouts'. Publishing needs no turn: it is done from a snapshot on the host.

Invariant: the policy is told to come only when each rollout that may be on the device has said that it left, or is gone
with its process; rollouts are told to come only when the policy has said so. A rollout that joined from elsewhere has a
device of its own and no turns. Who is waited for is named, at the latest before `run.deadline_s` is over.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from cosmos_actor.actors.messages import Member
from cosmos_actor.actors.processes import process_lives
from cosmos_actor.bus import BusError, Link
from cosmos_actor.bus.errors import DeadlineExceeded, LinkClosed, PeerLost
from cosmos_actor.job.turns import POLICY, ROLLOUT, Begin, Decision, HandOver, Side, Turns
from cosmos_actor.roles.engine import KV_CACHE, WEIGHTS
from cosmos_actor.roles.messages import GenerationRequest, MendRequest
from cosmos_actor.roles.turn_messages import ParkRequest, SleepRequest, TurnOver, UnparkRequest, WakeRequest

if TYPE_CHECKING:
    from cosmos_actor.job.job import Job

SHARE = 0.9
"""Of `run.deadline_s`: whoever is waited for is named before the recipe's own wait ends without a name."""
LEAVE = "to end what is in flight and leave the GPU"
LOOK_S = 0.1
"""Between two looks for a rollout whose link is lost, and whose process may live."""


def side_of(role: str, message: Any) -> Side | None:
    """Whose turn a question needs; None: it is answered without the device."""
    if role == ROLLOUT and isinstance(message, GenerationRequest):
        return ROLLOUT  # type: ignore[return-value]
    if role == POLICY and not isinstance(message, MendRequest):
        return POLICY  # type: ignore[return-value]
    return None


class HandOff:
    """See the module."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._epoch = 0
        self._turns = Turns()
        self._numbers, self._serials = itertools.count(), itertools.count()
        self._turn = 0
        self._begun: dict[int, asyncio.Future[None]] = {}
        self._names: dict[int, str] = {}
        """What each ticket is for."""
        self._asked: dict[tuple[str, str], float] = {}
        """(what, actor) of a hand-over -> since when it is waited for."""
        self._present: dict[str, Member] = {}
        """Incarnation -> a rollout that may be on the device: it was told to come, and has not said that it left."""
        self._late: set[asyncio.Task[None]] = set()
        """Rollouts that came in the midst of their turn and are being woken."""
        self._failure: Exception | None = None
        job.fleet.on_joined(self._on_joined)

    # ---- what the job does with it

    async def begin_life(self, epoch: int) -> None:
        """The policy is about to be restored, wherever everybody was: no rollout is on the device when this returns."""
        self._epoch, self._failure, self._turns = epoch, None, Turns()
        self._turn = next(self._serials)
        fleet, deadline_s = self._job.fleet, self._job.settings.run.deadline_s * SHARE
        await fleet.wait_for_members(POLICY, 1, deadline_s)  # by then it is known who else is there
        for member in self._here():  # one that is not ready was never told to come
            if member.ready:
                self._present[member.incarnation] = member
        await self._rollouts_sleep()
        self._turns.handed(POLICY)  # type: ignore[arg-type]

    @asynccontextmanager
    async def turn(self, side: Side, what: str) -> AsyncIterator[None]:
        """Inside, the device is `side`'s. Raises DeadlineExceeded, or what made a hand-over fail."""
        number = next(self._numbers)
        begun = self._begun[number] = asyncio.get_running_loop().create_future()
        self._names[number] = what
        try:
            self._do(self._turns.asked(number, side))
            if not begun.done():
                await self._wait_for(begun, side, what)
            yield
        finally:
            del self._begun[number], self._names[number]
            self._do(self._turns.ended(number))

    def check(self) -> None:
        """Raises what a rollout that came late could not do."""
        if self._failure is not None:
            raise self._failure

    def questions(self) -> list[dict[str, Any]]:
        """What hand-overs wait for, as Fleet.questions has it."""
        now = self._job.clock.monotonic()
        return [{"what": what, "role": ROLLOUT, "at": actor, "count": 1, "for_s": round(now - since, 2)}
                for (what, actor), since in self._asked.items()]

    # ---- what the core decides

    def _do(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Begin):
                for ticket in decision.tickets:
                    if not self._begun[ticket].done():
                        self._begun[ticket].set_result(None)
            elif isinstance(decision, HandOver):
                self._job.spawn(self._hand_over(decision.to))

    async def _wait_for(self, begun: asyncio.Future[None], side: Side, what: str) -> None:
        deadline_s = self._job.settings.run.deadline_s
        try:
            await asyncio.wait_for(begun, deadline_s)
        except asyncio.TimeoutError as error:
            holders = [self._names[ticket] for ticket in self._turns.held if ticket in self._names]
            waits = [f"{what} of {actor}" for what, actor in self._asked]
            why = ", ".join([*holders, *waits]) or "a hand-over"
            raise DeadlineExceeded(f"{what} waited {deadline_s:g} s for the {side}'s turn on the GPU, behind {why}",
                                   setting="run.deadline_s") from error

    async def _hand_over(self, to: Side) -> None:
        turns, begun = self._turns, self._job.clock.monotonic()
        self._turn = next(self._serials)
        try:
            await (self._to_policy() if to == POLICY else self._to_rollouts())
        except Exception as error:  # whatever it is: who waits for a turn is to hear of it, and nobody else would
            turns.failed()
            for future in self._begun.values():
                if not future.done():
                    future.set_exception(error)
            return
        self._job.journal.spent("hand_off", self._job.clock.monotonic() - begun)
        self._do(turns.handed(to))

    # ---- to the policy

    async def _to_policy(self) -> None:
        await self._rollouts_sleep()
        await self._ask_policy(UnparkRequest(self._epoch, self._turn), "to come back to the GPU")

    async def _rollouts_sleep(self) -> None:
        """All that may be on the device, until each has said that it left or is gone with its process."""
        for task in self._late:
            task.cancel()
        until = self._job.clock.monotonic() + self._job.settings.run.deadline_s * SHARE
        await asyncio.gather(*(self._sleeps(member, until) for member in list(self._present.values())))

    async def _sleeps(self, member: Member, until: float) -> None:
        request = SleepRequest(self._epoch, self._turn, self._job.settings.rollout.sleep_level)
        with self._waiting(LEAVE, member.actor):
            while not self._is_gone(member):
                if self._job.clock.monotonic() > until:
                    raise self._late_error(member.actor, LEAVE)
                link = self._job.fleet.links(ROLLOUT).get(member.actor)
                if link is None or link.peer.incarnation != member.incarnation:
                    await asyncio.sleep(LOOK_S)
                elif (over := await self._answer(link, request, until, LEAVE)) is not None:
                    self._measured(over)
                    break
        self._present.pop(member.incarnation, None)

    def _is_gone(self, member: Member) -> bool:
        """With its process. Who only keeps silent is no member any more, and has its memory still."""
        known = self._job.fleet.known(ROLLOUT).get(member.actor)
        if known is not None and known.incarnation == member.incarnation:
            return False
        return member.pid == os.getpid() or not process_lives(member.pid)

    def _here(self) -> list[Member]:
        return [member for member in self._job.fleet.known(ROLLOUT).values() if not member.joined]

    def _measured(self, over: TurnOver) -> None:
        if over.used_bytes:
            self._job.journal.highest("memory/rollout_peak_bytes", over.peak_bytes)
            self._job.journal.highest("memory/rollout_used_bytes", over.used_bytes)

    # ---- to the rollouts

    async def _to_rollouts(self) -> None:
        await self._ask_policy(ParkRequest(self._epoch, self._turn), "to leave the GPU")
        links = self._job.fleet.links(ROLLOUT)
        await asyncio.gather(*(self._wakes(member, links[member.actor]) for member in self._here()
                               if member.actor in links))

    async def _wakes(self, member: Member, link: Link) -> None:
        """Until it acts with the newest version, or is lost: when it is back it is woken again."""
        job, actor = self._job, member.actor
        until = job.clock.monotonic() + job.settings.run.deadline_s * SHARE
        if link.peer.incarnation != member.incarnation:
            return  # it has just died, and the next one is linked soon
        self._present[member.incarnation] = member
        for part in (WEIGHTS, KV_CACHE):
            what = f"to have its {part} on the GPU"
            with self._waiting(what, actor):
                if await self._answer(link, WakeRequest(self._epoch, self._turn, [part]), until, what) is None:
                    return
            if part == WEIGHTS:
                await self._takes_newest(link, until)

    async def _takes_newest(self, link: Link, until: float) -> None:
        what = f"to take weights {self._job.weights.published_step}"
        with self._waiting(what, link.peer.actor):
            self._job.weights.announce_again(link)
            try:
                await asyncio.wait_for(self._job.weights.until_held_at(link), self._left(until))
            except asyncio.TimeoutError as error:
                raise self._late_error(link.peer.actor, what) from error

    def _on_joined(self, member: Member, link: Link) -> None:
        """A rollout of this host that comes in the rollouts' turn is woken; in the policy's it stays asleep."""
        if member.role == ROLLOUT and not member.joined and ROLLOUT in (self._turns.turn, self._turns.toward):
            task = self._job.spawn(self._wakes_late(member, link))
            self._late.add(task)
            task.add_done_callback(self._late.discard)

    async def _wakes_late(self, member: Member, link: Link) -> None:
        try:
            await self._wakes(member, link)
        except Exception as error:  # whatever it is: nobody waits for this one, and the job must hear of it
            self._failure = self._failure or error

    # ---- one question

    async def _ask_policy(self, request: Any, what: str) -> Any:
        """Raises StateLost when it dies meanwhile: then the job goes back, and with it the turns."""
        deadline_s = self._job.settings.run.deadline_s * SHARE
        try:
            return await self._job.fleet.submit(POLICY, request, deadline_s=deadline_s,
                                                what=f"turn {self._epoch}.{self._turn}: {what}")
        except DeadlineExceeded as error:
            raise self._late_error("the policy", what) from error

    async def _answer(self, link: Link, request: Any, until: float, what: str) -> Any:
        """None when its link is lost before it answered. Raises DeadlineExceeded with its name, or what it raised."""
        try:
            return await link.call(request, deadline_s=self._left(until))
        except (PeerLost, LinkClosed):
            return None
        except DeadlineExceeded as error:
            raise self._late_error(link.peer.actor, what) from error

    def _late_error(self, actor: str, what: str) -> BusError:
        deadline_s = self._job.settings.run.deadline_s * SHARE
        return DeadlineExceeded(f"waited {deadline_s:g} s for {actor} {what}", setting="run.deadline_s")

    def _left(self, until: float) -> float:
        return max(0.001, until - self._job.clock.monotonic())

    @contextmanager
    def _waiting(self, what: str, actor: str) -> Iterator[None]:
        self._asked[what, actor] = self._job.clock.monotonic()
        try:
            yield
        finally:
            self._asked.pop((what, actor), None)
