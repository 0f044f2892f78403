"""Experience on its way: what is asked for, until it is in the replay buffer and a step may take it.

    generate -> Part (one fixed batch) -> scored -> stored          each part goes on by itself
                  |                  ^-------'---------'  its arrays died with their holder: made again
                  `-> asked again, refused, in quarantine, too late

`Intake` is the shell of `actors/limiter.py`: it tells the limiter what happens and does what it decides. All of it runs
on the bus's loop.

Invariant: a group is under way at the limiter exactly while a part with it is, and what the limiter has given up never
reaches the ledger or the replay buffer again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cosmos_actor.actors.experience import Group, Task, in_order
from cosmos_actor.actors.fleet import StateLost
from cosmos_actor.actors.handle import Handle, settled
from cosmos_actor.actors.ledger import Key
from cosmos_actor.actors.limiter import AskAgain, Drop, GiveUp, Go, Hold, Limiter, RateLimits, Replace
from cosmos_actor.bus import BusError

if TYPE_CHECKING:
    from cosmos_actor.job.job import Job

MOST_MADE = 10
"""How often a part is made. Each time somebody has died, so a part that needs more has another reason."""
Value = TypeVar("Value")
Result = TypeVar("Result")
Groups = list[Group]
"""On their way. Their producer holds arrays on the bulk plane until the last of these objects is dropped."""
STRAGGLER = "straggler"
"""Why the ledger drops what `limiter.straggler` = "drop" gives up."""


class ShortSample(BusError):
    """Nothing can bring the groups that a step needs."""


class ArraysGone(StateLost):
    """Arrays of a message died with their holder. Who can make them again does; else the job goes back."""


class Refused(Exception):
    """This part was given up before it came."""


def keys_of(items: Sequence[Task | Group]) -> list[Key]:
    """The ledger's keys of all trajectories of `items`."""
    return [key for item in items for key in item.keys]


def rate_limits(settings: Any) -> RateLimits:
    """What the run's settings ask of the limiter."""
    limiter = settings.limiter
    return RateLimits(
        groups=settings.data.prompts_per_step, max_staleness=settings.run.max_staleness, ahead=limiter.ahead,
        samples_per_insert=limiter.samples_per_insert, min_groups=limiter.min_groups, at_bound=limiter.at_bound,
        straggler_s=limiter.straggler_s, straggler=limiter.straggler, shortfall=limiter.shortfall)


class Flight:
    """What all stages of one part share."""

    def __init__(self, items: Sequence[Task | Group], version: int) -> None:
        self.names = [item.group_id for item in items]
        self.keys = keys_of(items)
        self.version = version
        self.storing = False
        """The replay buffer is being given it: too late to refuse it."""
        self.refused = False
        self.sampled = False
        """The ledger has it as generated."""
        self.again = asyncio.Event()

    def check(self) -> None:
        """Raises Refused once it was given up: nothing more may be written about it."""
        if self.refused:
            raise Refused

    async def ask(self, job: Job, role: str, message: Any, what: str) -> Any:
        """The answer of one member; of another as well, whenever `again` is set. The first answer counts."""
        asked = [job.spawn(job.submit(role, message, what))]
        while True:
            again = asyncio.ensure_future(self.again.wait())
            try:
                done, _ = await asyncio.wait([*asked, again], return_when=asyncio.FIRST_COMPLETED)
            finally:
                again.cancel()
            answered = sorted((task for task in asked if task in done), key=lambda task: task.exception() is not None)
            if answered and (len(answered) == len(asked) or answered[0].exception() is None):
                self.check()
                return answered[0].result()
            asked = [task for task in asked if task not in done]
            if self.again.is_set():
                self.again.clear()
                asked.append(job.spawn(job.submit(role, message, what)))


class Part:
    """One fixed batch of groups at one stage of its way. Made again it is the same, whoever makes it."""

    def __init__(self, job: Job, flight: Flight, make: Callable[[], Coroutine[Any, Any, Groups]], *,
                 most: int = MOST_MADE) -> None:
        self.flight = flight
        self._job, self._make, self._left = job, make, most - 1
        self.task = job.spawn(make())

    async def groups(self) -> Groups:
        """Raises Refused, Poison, or what the stage raised."""
        return await asyncio.shield(self.task)

    async def anew(self, gone: Groups, error: ArraysGone) -> Groups:
        """The groups, in the place of `gone`; raises `error` when that has not helped for too often."""
        if self.task.done() and self.task.result() is gone:  # else somebody else has had them made again
            if self._left == 0:
                raise error
            self._left -= 1
            names = self.flight.names
            self._job.tell("made_again", what=f"{len(names)} groups from {names[0]} on", reason=str(error))
            self.task = self._job.spawn(self._make())
        return await self.groups()


class Experience(Handle[Groups]):
    """A step's groups that come in parts. `resolve` waits for all of them, in the order of their ids.

    A call that is given one goes on with each part as it comes.
    """

    again = None
    """Its parts know how to be made again; the whole of it does not."""

    def __init__(self, job: Job, parts: Any, what: str) -> None:
        self.what = what
        self._job = job
        self._come: list[Part] = []
        self._whole: Handle[Groups] | None = None
        self.parts: Handle[list[Part]] = job.handle(self._noted(parts), what)

    async def _noted(self, parts: Any) -> list[Part]:
        self._come = await parts
        return self._come

    def resolve(self, timeout_s: float | None = None) -> Groups:
        if self._whole is None:
            self._whole = self._job.handle(self.value(), self.what)
        return self._whole.resolve(timeout_s)

    def done(self) -> bool:
        return self.parts.done() and all(part.task.done() for part in self._come)

    def cancel(self) -> None:
        self.parts.cancel()
        if self._whole is not None:
            self._whole.cancel()

    async def value(self) -> Groups:
        found = await asyncio.gather(*(part.groups() for part in await self.parts.value()))
        return in_order(group for groups in found for group in groups)


async def used(job: Job, argument: Handle[Value] | Value, use: Callable[[Value], Coroutine[Any, Any, Result]]
               ) -> Result:
    """`use` of a call's argument. What died with its holder is asked for again, where its handle knows how."""
    value = await settled(argument)
    for _ in range(MOST_MADE - 1):
        try:
            return await use(value)
        except ArraysGone as gone:
            if not isinstance(argument, Handle) or argument.again is None:
                raise
            job.tell("made_again", what=argument.what, reason=str(gone))
            value = await argument.again()
    return await use(value)


async def parts_of(job: Job, experience: Handle[Groups] | Groups) -> list[Part]:
    """The parts of an experience; groups that are there already are parts that have come."""
    if isinstance(experience, Experience):
        return await experience.parts.value()
    return [arrived(job, groups) for groups in job.in_parts(await settled(experience))]


def arrived(job: Job, groups: Groups) -> Part:
    """Nobody here knows how to make these again."""
    async def as_they_are() -> Groups:
        return groups

    return Part(job, Flight(groups, min(group.version_dispatch for group in groups)), as_they_are,
                most=1)


class Intake:
    """See the module."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.limiter = Limiter(rate_limits(job.settings))
        self._flights: dict[str, Flight] = {}
        self._moved = asyncio.Event()
        self._failure: Exception | None = None

    # ---- what happens

    def restored(self) -> None:
        """The job goes on from a checkpoint: what the ledger has as buffered is there, nothing else."""
        self._flights.clear()
        self._failure = None
        self.limiter.restored(self._job.ledger.buffered_groups())

    def opened(self, step: int) -> None:
        self.limiter.opened(step)

    def dispatched(self, step: int, parts: Sequence[Part]) -> None:
        """`step` has these parts under way."""
        now = self._job.clock.monotonic()
        for number, flight in enumerate(part.flight for part in parts):
            if number:
                self.limiter.opened(step)
            self.limiter.dispatched(step, flight.names, flight.version, now)
            self._flights.update(dict.fromkeys(flight.names, flight))
        self._moved.set()

    def stored(self, flight: Flight) -> None:
        self.limiter.stored(flight.names)
        self._landed(flight.names)

    def gone(self, names: Sequence[str], reason: str) -> None:
        """These will not be trained."""
        self.limiter.gone(names, reason)
        self._landed(names)

    def lost(self, flight: Flight, reason: str) -> None:
        """The ledger drops the part for `reason`, and nobody waits for it any more."""
        flight.refused = True
        self._job.ledger.dropped(flight.keys, reason)
        self.gone(flight.names, reason)

    def failed(self, error: Exception) -> None:
        """What no limit has an answer to: whoever waits for samples raises it."""
        self._failure = self._failure or error
        self._moved.set()

    def left_over(self, reason: str) -> None:
        """The run is over: what is under way or in the buffer will not be trained."""
        for flight in self._flights.values():
            flight.refused = True
        self._job.ledger.drop_open(reason)

    def _landed(self, names: Sequence[str]) -> None:
        for name in names:
            self._flights.pop(name, None)
        self._moved.set()

    # ---- what is decided

    async def may_ask(self, step: int, in_hand: int) -> bool:
        """Whether to ask for the samples of `step` now. Waits for leave where step `in_hand` can not do without."""
        while isinstance(hold := self.limiter.may_ask(step, in_hand, self._job.clock.monotonic()), Hold):
            if step > in_hand:
                return False
            await self._move(hold)
        return True

    async def until_trainable(self, step: int) -> int:
        """How many groups to train at `step`, once it may be. Raises ShortSample, or what made a part fail."""
        while True:
            decision = self.limiter.train(step, self._job.clock.monotonic())
            if isinstance(decision, Go):
                return decision.groups
            if isinstance(decision, GiveUp):
                raise ShortSample(decision.reason, setting="limiter.min_groups")
            if isinstance(decision, AskAgain):
                for flight in self._of(decision.groups):
                    flight.again.set()
            elif isinstance(decision, Replace):
                self._job.replace(step, decision.first, decision.count)
            elif isinstance(decision, Hold) or not self._drop(decision):
                await self._move(decision if isinstance(decision, Hold) else Hold("the replay buffer"))

    def _drop(self, decision: Drop) -> bool:
        """Whether any of them could still be refused."""
        flights = [flight for flight in self._of(decision.groups) if not flight.storing]
        for flight in flights:
            self.lost(flight, STRAGGLER)
        return bool(flights)

    def _of(self, names: Sequence[str]) -> list[Flight]:
        return list({id(flight): flight for name in names if (flight := self._flights.get(name))}.values())

    async def _move(self, hold: Hold) -> None:
        """Until something happened, or the hold is over. Raises what made a part fail."""
        self._moved.clear()
        if self._failure is not None:
            raise self._failure
        left = None if hold.until is None else max(0.0, hold.until - self._job.clock.monotonic())
        with self._job.waiting(hold.why):
            try:
                await asyncio.wait_for(self._moved.wait(), left)
            except asyncio.TimeoutError:
                return
