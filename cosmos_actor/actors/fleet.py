"""The controller's view of all actors: who can be asked, and what happens to a question when its actor dies.

    submit -> waiting for a free member -> with a member -> answered
                     ^------- member lost (stateless) --'  `-> StateLost (stateful)

Invariant: a question is with at most one live member at a time, and it ends answered, failed by the role itself, past
its deadline, in quarantine because it kills its consumers, or (stateful roles) as StateLost. It is never silently gone:
what nobody will answer is a dead letter.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any

from cosmos_actor.actors.context import ActorClock
from cosmos_actor.actors.dead_letters import DeadLetters, letter
from cosmos_actor.actors.messages import MEMBERSHIP_TOPIC, Member, Membership, StopActor
from cosmos_actor.actors.poison import Suspects
from cosmos_actor.bus import (
    BulkGone,
    Bus,
    BusError,
    DeadlineExceeded,
    Link,
    MessageTooLarge,
    PeerLost,
    RemoteError,
    SchemaError,
)

DIAL_DEADLINE_S = 10.0
"""One attempt to dial an announced actor; they go on until the head says that it is gone."""
DIAL_PAUSE_S = 0.5
"""Between two attempts. Without it an actor that refuses us is asked thousands of times a second."""
MAX_ATTEMPTS = 20
"""Members that one question may outlive. A question that kills every member it meets must end as an error."""
DISMISS_DEADLINE_S = 2.0
"""How long a dismissed actor may take to hear of it. What it holds is asked of others then."""


class StateLost(BusError):
    """A stateful actor died, so what it knew since the last checkpoint is gone and the job has to go back there."""


class WorkLost(BusError):
    """A question outlived too many members."""


@dataclass
class _Seat:
    """One member as the fleet uses it."""

    member: Member
    link: Link
    in_flight: int = 0
    answered: int = 0
    on_trial: bool = False
    """It has a suspect, so it gets nothing beside it."""


@dataclass
class _Question:
    """One that is not answered; `at` is empty while it waits for a free member."""

    what: str
    role: str
    since: float
    at: str = ""
    work: Hashable = None
    """What `Suspects` knows it by."""


class Fleet:
    """Gives questions to members of a role and follows the head's membership. Lives on the bus's loop."""

    def __init__(self, bus: Bus, *, stateful: frozenset[str], max_in_flight: int, clock: ActorClock,
                 poison_deaths: int = MAX_ATTEMPTS, letters: DeadLetters | None = None,
                 unfit: frozenset[str] = frozenset()) -> None:
        """`unfit`: errors by which a member says that it can not do what others can; who joined is dismissed then."""
        self._bus = bus
        self._stateful = stateful
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._seats: dict[str, _Seat] = {}
        self._members: dict[str, Member] = {}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._newest = ("", -1)
        """Incarnation of the head and serial of its membership."""
        self._closed = False
        self._joined_callbacks: list[Callable[[Member, Link], None]] = []
        self._unfit = unfit
        self._dismissed: set[str] = set()
        """Incarnations that get nothing more, though the head knows them."""
        self.on_dismissed: Callable[[Member, str], None] = lambda member, reason: None
        self.lost: StateLost | None = None
        self.redelivered: Counter[str] = Counter()
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count()
        self._suspects = Suspects(poison_deaths)
        self._trials: Counter[str] = Counter()
        """Role -> suspects that wait for a member of their own."""
        self._letters = letters
        bus.serve_state(MEMBERSHIP_TOPIC, self._on_membership)
        bus.on_link_down(self._on_link_down)

    # ---- questions

    async def submit(self, role: str, message: Any, *, deadline_s: float, what: str) -> Any:
        """The answer of one member of `role`.

        Raises DeadlineExceeded, RemoteError, StateLost, WorkLost, or Poison for what killed the members it was with.
        """
        number, question = next(self._numbers), _Question(what, role, self._clock.monotonic())
        question.work = (role, what) if role in self._stateful else number  # the former is asked again by the next life
        self._questions[number] = question
        try:
            return await self._submit(question, message, question.since + deadline_s)
        except (DeadlineExceeded, MessageTooLarge, RemoteError, SchemaError, WorkLost) as error:
            self._suspects.cleared(question.work)
            self._note_dead(question, message, error)
            raise
        finally:
            self._suspects.cleared(number)
            del self._questions[number]

    async def _submit(self, question: _Question, message: Any, until: float) -> Any:
        role, what, work = question.role, question.what, question.work
        for _ in range(MAX_ATTEMPTS):
            question.at = ""
            if self._suspects.guilty(work):
                raise await self._poison(question, message)
            seat = await self._seat_for(question, until)
            question.at = seat.member.actor
            try:
                answer = await self._ask(seat, message, until)
                self._suspects.cleared(work)
                return answer
            except PeerLost as error:
                self._suspects.lost(work, seat.member.actor, seat.member.incarnation)
                await self._member_lost(seat, str(error))
                if role in self._stateful:
                    raise self.lost or self._state_lost(seat, str(error)) from error
                self.redelivered[role] += 1
            except RemoteError as error:
                if error.kind not in self._unfit or not self.dismiss(seat.link, error.remote_text):
                    raise
                self.redelivered[role] += 1
        raise WorkLost(f"{what} outlived {MAX_ATTEMPTS} members of {role}", setting=f"{role}.count")

    async def _seat_for(self, question: _Question, until: float) -> _Seat:
        """A suspect gets a member of its own, and goes before what is not suspected."""
        if not self._suspects.suspected(question.work):
            return await self._free_seat(question.role, until, question.what)
        self._trials[question.role] += 1
        try:
            seat = await self._free_seat(question.role, until, question.what, alone=True)
            seat.on_trial = True
            return seat
        finally:
            self._trials[question.role] -= 1
            self._spawn(self._notify())

    async def _poison(self, question: _Question, message: Any) -> BusError:
        victims = self._suspects.victims(question.work)
        self._suspects.cleared(question.work)
        if self._letters is None:
            return WorkLost(f"{question.what} killed {len(victims)} members of {question.role}")
        return await self._letters.quarantine(message, self._bus, role=question.role, what=question.what,
                                              killed=victims)

    def _note_dead(self, question: _Question, message: Any, error: BusError) -> None:
        """Arrays that are gone with their holder make the job go back, which does the work again."""
        if self._letters is None or (isinstance(error, RemoteError) and error.kind == BulkGone.__name__):
            return
        self._letters.add(letter(error, message, role=question.role, what=question.what,
                                 present=len(self._usable(question.role))))

    async def wait_for_members(self, role: str, count: int, deadline_s: float) -> None:
        """Return when `count` members of `role` are ready. DeadlineExceeded names the role and how many are."""
        until = self._clock.monotonic() + deadline_s

        def enough() -> bool:
            return len(self._usable(role)) >= count

        number = next(self._numbers)
        self._questions[number] = _Question(f"{count} ready actors of role {role}", role, self._clock.monotonic())
        try:
            await self._wait(enough, until, lambda: f"{count} actors of role {role} (present: "
                             f"{len(self._usable(role))})", setting=f"{role}.min_actors")
        finally:
            del self._questions[number]

    def dismiss(self, link: Link, reason: str) -> bool:
        """Who joined loses its place: its work goes to others, and it is told to end. False for the run's own actors.

        Also true for who is not here any more: nothing needs to be done about it.
        """
        seat = self._seats.get(link.peer.actor)
        if seat is None or seat.link is not link or link.peer.incarnation in self._dismissed:
            return True
        if not seat.member.joined:
            return False
        self._dismissed.add(seat.member.incarnation)
        self.on_dismissed(seat.member, reason)
        self._spawn(self._see_off(seat, reason))
        return True

    async def _see_off(self, seat: _Seat, reason: str) -> None:
        try:
            await seat.link.call(StopActor(reason), deadline_s=DISMISS_DEADLINE_S)
        except BusError:
            pass  # it is mute, or went at once
        self._bus.forget(seat.member.actor, seat.member.incarnation, f"dismissed: {reason}")

    def close(self) -> None:
        """Dial nobody any more; for the end of the job, before its bus is closed."""
        self._closed = True
        for task in self._dialling.values():
            task.cancel()

    def state_is_fresh(self) -> None:
        """The job has gone back to a checkpoint: stateful roles may be asked again."""
        self.lost = None

    def links(self, role: str) -> dict[str, Link]:
        return {name: seat.link for name, seat in self._seats.items() if seat.member.role == role}

    def known(self, role: str) -> dict[str, Member]:
        """Those of `role` that the head knows, linked or not."""
        return {name: member for name, member in self._members.items() if member.role == role}

    def on_joined(self, callback: Callable[[Member, Link], None]) -> None:
        self._joined_callbacks.append(callback)

    def members(self, role: str) -> dict[str, dict[str, int]]:
        """What each present member of `role` has on its hands and has answered."""
        return {name: {"in_flight": seat.in_flight, "answered": seat.answered}
                for name, seat in sorted(self._seats.items()) if seat.member.role == role}

    def questions(self) -> list[dict[str, Any]]:
        """What is asked and not answered: what, role, at (the member that has it, or ""), count, for_s (the oldest)."""
        now = self._clock.monotonic()
        alike: dict[tuple[str, str, str], list[float]] = {}
        for question in self._questions.values():
            alike.setdefault((question.what, question.role, question.at), []).append(question.since)
        return [{"what": what, "role": role, "at": at, "count": len(since), "for_s": round(now - min(since), 2)}
                for (what, role, at), since in sorted(alike.items(), key=lambda entry: min(entry[1]))]

    def statistics(self) -> dict[str, Any]:
        roles = sorted({seat.member.role for seat in self._seats.values()})
        return {"members": {role: self.members(role) for role in roles}, "redelivered": dict(self.redelivered)}

    # ---- one question with one member

    async def _ask(self, seat: _Seat, message: Any, until: float) -> Any:
        seat.in_flight += 1
        try:
            receipt = await seat.link.send_work(message, deadline_s=self._left(until))
            answer = await receipt.result(self._left(until))
            seat.answered += 1
            return answer
        finally:
            seat.in_flight -= 1
            seat.on_trial = False
            await self._notify()

    def _usable(self, role: str) -> list[_Seat]:
        return [seat for seat in self._seats.values() if seat.member.role == role and self._takes_work(seat.member)]

    def _takes_work(self, seated: Member) -> bool:
        newest = self._members.get(seated.actor, seated)
        return (newest.incarnation == seated.incarnation and newest.ready and not newest.leaving
                and seated.incarnation not in self._dismissed)

    def _pick(self, role: str, alone: bool = False) -> _Seat | None:
        if self._trials[role] and not alone:
            return None
        most = 0 if alone else self._max_in_flight - 1
        free = [seat for seat in self._usable(role) if seat.in_flight <= most and not seat.on_trial]
        return min(free, key=lambda seat: (seat.in_flight, seat.answered, seat.member.actor), default=None)

    async def _free_seat(self, role: str, until: float, what: str, *, alone: bool = False) -> _Seat:
        def ready() -> bool:
            return self._refusal(role) is not None or self._pick(role, alone) is not None

        while True:
            await self._wait(ready, until, lambda: f"a free actor of role {role} for {what}", setting=f"{role}.count")
            refusal = self._refusal(role)
            if refusal is not None:
                raise refusal
            seat = self._pick(role, alone)
            if seat is not None:
                return seat  # else another question that waited took it, or it died, before this one woke

    def _refusal(self, role: str) -> StateLost | None:
        return self.lost if role in self._stateful else None

    async def _wait(self, condition: Callable[[], bool], until: float, what: Callable[[], str], *,
                    setting: str) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(condition), self._left(until))
            except asyncio.TimeoutError as error:
                raise DeadlineExceeded(f"waited in vain for {what()}", setting=setting) from error

    def _left(self, until: float) -> float:
        return max(0.001, until - self._clock.monotonic())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ---- membership

    async def _on_membership(self, membership: Membership, link: Link) -> None:
        head, serial = self._newest
        if link.peer.incarnation == head and membership.serial <= serial:
            return
        self._newest = (link.peer.incarnation, membership.serial)
        for actor, member in list(self._members.items()):
            if member.incarnation in membership.departed:
                self._suspects.died(member.incarnation, membership.departed[member.incarnation],
                                    supervised=not member.joined)
                self._bus.forget(actor, member.incarnation, membership.departed[member.incarnation])
        self._members = {member.actor: member for member in membership.members}
        self._dismissed &= {member.incarnation for member in membership.members}
        for member in membership.members:
            self._dial_if_needed(member)
        await self._notify()

    def _is_known(self, incarnation: str) -> bool:
        return any(member.incarnation == incarnation for member in self._members.values())

    def _dial_if_needed(self, member: Member) -> None:
        seat = self._seats.get(member.actor)
        seated = seat is not None and seat.member.incarnation == member.incarnation
        unwanted = member.incarnation in self._dismissed or member.actor == self._bus.identity.actor
        if seated or self._closed or unwanted:
            return
        if member.incarnation not in self._dialling:
            self._dialling[member.incarnation] = asyncio.get_running_loop().create_task(self._dial(member))

    async def _dial(self, member: Member) -> None:
        try:
            while self._is_known(member.incarnation):
                try:
                    link = await self._bus.connect(member.address, role=member.role, actor=member.actor,
                                                   deadline_s=DIAL_DEADLINE_S)
                except BusError:
                    await asyncio.sleep(DIAL_PAUSE_S)  # it may have died meanwhile: the head will say so
                    continue
                await self._seat(member, link)
                return
        finally:
            self._dialling.pop(member.incarnation, None)

    async def _seat(self, member: Member, link: Link) -> None:
        if link.peer.incarnation != member.incarnation:
            return
        older = self._seats.get(member.actor)
        if older is not None:
            await self._member_lost(older, f"replaced by incarnation {member.incarnation}")
        self._seats[member.actor] = _Seat(member, link)
        for callback in self._joined_callbacks:
            callback(member, link)
        await self._notify()

    def _on_link_down(self, link: Link, reason: str) -> None:
        """The head may still know it as alive, when only our link broke: then it is dialled again."""
        seat = self._seats.get(link.peer.actor)
        if seat is not None and seat.link is link:
            self._unseat(seat, reason)
            self._spawn(self._notify())
        member = self._members.get(link.peer.actor)
        if member is not None and member.incarnation == link.peer.incarnation:
            self._dial_if_needed(member)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _member_lost(self, seat: _Seat, reason: str) -> None:
        self._unseat(seat, reason)
        await self._notify()

    def _unseat(self, seat: _Seat, reason: str) -> None:
        """Once a seat, whoever notices first: a late notice must not spoil what the job has restored meanwhile."""
        if self._seats.get(seat.member.actor) is not seat:
            return
        del self._seats[seat.member.actor]
        if seat.member.role in self._stateful and self.lost is None:
            self.lost = self._state_lost(seat, reason)

    def _state_lost(self, seat: _Seat, reason: str) -> StateLost:
        return StateLost(f"{seat.member.actor} is gone with what it held: {reason}", peer=seat.member.actor)
