"""A job, as a recipe sees it: role clients to call, steps to walk through, and everything that must hold between steps.

    restore(latest checkpoint or none) -> steps ... -> finished
            ^------- StateLost (a stateful actor died) --'

Invariant: at the end of a step, all that happened up to it is in the metrics and the ledger, and a checkpoint of step k
is enough to go on exactly as an uninterrupted run would. Nothing that was asked for before a `restore` has an
effect after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, TypeVar

from cosmos_actor.actors.context import ActorClock
from cosmos_actor.actors.errors import BadValue
from cosmos_actor.actors.fleet import Fleet
from cosmos_actor.actors.handle import Driver, Handle
from cosmos_actor.actors.json_lines import JsonLinesWriter
from cosmos_actor.actors.ledger import Ledger
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.actors.runtime import ActorRuntime
from cosmos_actor.bus import Bus, BusError, RemoteError
from cosmos_actor.bus.errors import BulkGone, DeadlineExceeded
from cosmos_actor.job.checkpoints import Checkpoints
from cosmos_actor.job.clients import Data, Reference, ReplayBuffer, Reward, Rollout
from cosmos_actor.job.hand_off import HandOff, side_of
from cosmos_actor.job.intake import ArraysGone, Intake
from cosmos_actor.job.journal import Journal
from cosmos_actor.job.learners import Critic, Policy
from cosmos_actor.job.roles import STATEFUL
from cosmos_actor.job.simulators import Simulators
from cosmos_actor.job.turns import Side
from cosmos_actor.job.weights import Weights
from cosmos_actor.simulator_bridge.messages import SIMULATOR
from cosmos_actor.weight_plane.fanout_desk import FanOutDesk

Item = TypeVar("Item")
LIFE_END_S = 5.0
"""How long the questions of a life may take to end once they are cancelled. None of them waits for anybody then."""


class StopAsked(Exception):
    """Somebody asked the job to stop, or its controller to end: in the first case the last finished step is saved."""


class Job:
    """What a recipe's loop works with. Used from the recipe's thread; the clients' coroutines run on the bus's loop."""

    def __init__(self, settings: Any, *, bus: Bus, fleet: Fleet, driver: Driver, clock: ActorClock, paths: RunPaths,
                 ledger: Ledger, journal: Journal, takes_turns: bool = False) -> None:
        self.settings = settings
        self.bus, self.fleet, self.driver, self.clock = bus, fleet, driver, clock
        self.paths = paths
        self.ledger, self.journal = ledger, journal
        self.checkpoints = Checkpoints(paths, keep_last=settings.run.keep_last)
        self.step = 0
        """The last finished step."""
        self.step_in_hand = 0
        """The step being done, or the last finished one between two."""
        self.epoch = 0
        self.stop_asked: list[str] = []
        """Not empty: finish the step in hand, save it, and end; before the first step of a life, end. They say why."""
        self.dispatched_through = 0
        self.waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext
        """Who notes what the recipe waits for."""
        self._stored: dict[int, Handle[Any]] = {}
        self._questions: set[asyncio.Task[Any]] = set()
        """What this life has asked and what is done with the answers; on the bus's loop."""
        self._ended: BaseException | None = None
        self._begun = False
        """Whether this life has begun a step: before, nothing would be lost by ending at once."""
        self._granted = (0, 0)
        fleet.on_dismissed = lambda member, reason: self.tell("dismissed", actor=member.actor, reason=reason)
        self.intake = Intake(self)
        self.data, self.rollout, self.reward = Data(self), Rollout(self), Reward(self)
        self.replay_buffer, self.reference = ReplayBuffer(self), Reference(self)
        self.policy, self.critic = Policy(self), Critic(self)
        self.weights = Weights(self)
        self.fan_out = FanOutDesk(bus, settings.weights.patience_s)
        self._hand_off = HandOff(self) if takes_turns else None
        self._simulators = Simulators(self) if settings.run.experience == SIMULATOR else None

    @property
    def simulators(self) -> Simulators:
        """Raises BadValue in a job that has none."""
        if self._simulators is None:
            raise BadValue("this loop learns from simulators", setting='run.experience = "simulator"')
        return self._simulators

    @property
    def last_step(self) -> int:
        """The step at which the job is done: SFT steps, then updates by reinforcement."""
        return int(self.settings.policy.sft_steps + self.settings.run.steps)

    # ---- walking through steps

    def steps(self, last: int) -> Iterator[int]:
        """The steps up to and including `last` that are still to do; between two of them the job is made safe."""
        while self.step < last:
            self.step_in_hand, self._begun = self.step + 1, True
            self.journal.begin(self.step_in_hand)
            yield self.step_in_hand
            self.step = self.step_in_hand
            self.journal.finish(rollouts=len(self.fleet.members("rollout")), more=self._counts())
            self._make_safe(at_end=self.step == last)
        if self.step == self.last_step:
            self._on_loop(self.intake.left_over, "left over when the run ended")

    def dispatchable(self, step: int) -> Iterator[int]:
        """The steps whose samples may be asked for before step `step` is trained, each once: `limiter.ahead` of them.

        The limiter may hold later ones back; `step` itself it may only make wait.
        """
        furthest = min(step + self.intake.limiter.limits.steps_ahead, self.last_step)
        while (ahead := self.dispatched_through + 1) <= furthest:
            leave = self.handle(self.intake.may_ask(ahead, step), f"leave to ask for the samples of step {ahead}")
            if not leave.resolve():
                return
            self.dispatched_through = ahead
            yield ahead

    def expect(self, step: int, stored: Handle[Any]) -> None:
        """`stored` is done when the samples of `step` are in the replay buffer, or will never be."""
        self._stored[step] = stored

    def wait_for(self, step: int) -> None:
        """Wait until the limiter lets `step` be trained. Its samples may be stored from before a resume."""
        self._stored.pop(step, None)
        with self.journal.timing("waiting_for_samples"):
            groups = self.handle(self.intake.until_trainable(step), f"samples of step {step}").resolve()
        self._granted = (step, groups)

    def granted(self, step: int) -> int:
        """How many groups `step` may take from the replay buffer; a leave is good for one try."""
        if self._granted[0] != step:
            self.wait_for(step)
        groups = self._granted[1]
        self._granted = (0, 0)
        return groups

    def replace(self, step: int, first: int, count: int) -> Handle[int]:
        """Ask for others in the place of groups of `step` that will not come. On the bus's loop."""
        tasks = self.data.replacements(step, first, count)
        made = self.rollout.generate(tasks, step) if self._simulators is None else self._simulators.collect(tasks, step)
        return self.replay_buffer.put(self.reward.score(made), step, opened=True)

    def waits(self) -> list[dict[str, Any]]:
        """Who is held back by the limiter, for what and since when. Plain objects, from any thread."""
        return self.intake.limiter.waits(self.clock.monotonic())

    def log(self, phase: str, metrics: dict[str, Any]) -> None:
        """Add to the line of the current step."""
        self.journal.add(phase, metrics)

    def tell(self, event: str, **facts: Any) -> None:
        """A line in events.jsonl; metrics.jsonl is cut back by a rewind, so nothing else tells of it afterwards."""
        writer = JsonLinesWriter(self.paths.events)
        writer.append({"time": self.clock.wall(), "event": event, **facts})
        writer.close()

    def evaluation_due(self, step: int) -> bool:
        every = self.settings.run.eval_every
        due = bool(every) and ((step - self.settings.policy.sft_steps) % every == 0 or step == self.last_step)
        return due and step not in self.journal.evaluated

    def evaluate(self) -> None:
        """How well the newest weights answer held-out problems, greedily: a line of its own."""
        step, problems = self.weights.published_step, self.settings.data.eval_problems
        tasks = self.data.tasks(step, prompts=problems, samples=1, split="held_out")
        accuracy = self.reward.accuracy(self.rollout.generate(tasks, step, greedy=True)).resolve()
        self.journal.evaluation(step, {"eval/accuracy": accuracy, "eval/problems": problems})

    # ---- making safe, going back

    def restore(self, reason: str) -> None:
        """Become the latest checkpoint, or the beginning: stateful roles, the ledger, the metrics and this object."""
        self._end_life()
        self._begun = False
        latest = self.checkpoints.latest()
        self.step = self.step_in_hand = latest.step if latest else 0
        self.dispatched_through = max(latest.dispatched_through if latest else 0, self.settings.policy.sft_steps)
        self.epoch = self.checkpoints.next_epoch()
        self.weights.start_epoch(self.epoch)
        if self._hand_off is not None:
            self.handle(self._hand_off.begin_life(self.epoch), "the rollouts to leave the GPU").resolve()
        directory = str(latest.directory) if latest else None
        for client in self._stateful():
            client.restore(directory, self.step).resolve()
        self.ledger.roll_back(self.step, reason, keep=latest.buffered if latest else ())
        self.journal.roll_back(self.step)
        if self._simulators is not None:
            self._simulators.roll_back(self.step)
        self._on_loop(self.intake.restored)

    async def watch(self, runtime: ActorRuntime) -> None:
        """Make every wait of the recipe end when this actor's own life does."""
        await runtime.stopped.wait()
        self._ended = runtime.failure or StopAsked("the head asked for it")

    def close(self) -> None:
        try:
            self._end_life()
        finally:
            self.driver.start(self._leave_fleet())
            self.journal.close()
            if self._simulators is not None:
                self._simulators.close()
            self.ledger.close()

    def _end_life(self) -> None:
        """End all that this life has under way, so that none of it writes to the ledger or asks a role any more."""
        self._stored.clear()
        ending = self.driver.start(self._end_questions())
        if not self.driver.wait(ending, 2 * LIFE_END_S):
            raise DeadlineExceeded("the bus's loop does not turn, so the questions of the last life can not be ended")
        ending.result()

    async def _end_questions(self) -> None:
        until = self.clock.monotonic() + LIFE_END_S
        while self._questions and self.clock.monotonic() < until:
            for task in self._questions:
                task.cancel()
            await asyncio.wait(self._questions, timeout=LIFE_END_S)
        if self._questions:
            raise DeadlineExceeded(f"{len(self._questions)} questions of the last life do not end")
        self.fleet.state_is_fresh()

    async def _leave_fleet(self) -> None:
        self.fleet.close()

    async def _counted(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)
        return await coroutine

    def check_interrupted(self) -> None:
        """Called by every wait: raises what makes waiting pointless."""
        if self._ended is not None:
            raise self._ended
        if self.fleet.lost is not None:
            raise self.fleet.lost
        if self.stop_asked and not self._begun:
            raise StopAsked(self.stop_asked[0])
        self.weights.check()
        if self._hand_off is not None:
            self._hand_off.check()

    def handle(self, coroutine: Coroutine[Any, Any, Any], what: str, *,
               again: Callable[[], Coroutine[Any, Any, Any]] | None = None) -> Handle[Any]:
        return Handle(self.driver, self._counted(coroutine), what, deadline_s=self.settings.run.deadline_s,
                      interrupted=self.check_interrupted, waiting=self.waiting, again=again)

    def spawn(self, coroutine: Coroutine[Any, Any, Item]) -> asyncio.Task[Item]:
        """Run it as long as this life of the job. On the bus's loop."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)
        task.add_done_callback(_heard)
        return task

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        async def call() -> None:
            function(*arguments)

        self.handle(call(), function.__name__).resolve()

    def _counts(self) -> dict[str, int]:
        """Answers of who may come and go, and what was not in the ordinary course since this controller started."""
        ordinary = ("asked", "stored", "trained", "under_way", "in_buffer")
        members = [member for role in ("rollout", "reward") for member in self.fleet.members(role).items()]
        return {
            **{f"answers/{name}": member["answered"] for name, member in members},
            **{f"redelivered/{role}": count for role, count in sorted(self.fleet.redelivered.items())},
            **{f"limiter/{name}": count for name, count in self.intake.limiter.statistics().items()
               if name not in ordinary},
            **self.weights.counts(), **self.fan_out.counts()}

    def call(
        self, role: str, message: Any, what: str, then: Callable[[Any], Any] = lambda answer: answer
    ) -> Handle[Any]:
        """A question to any member of `role`, its answer passed through `then`."""

        async def ask() -> Any:
            return then(await self.submit(role, message, what))

        return self.handle(ask(), what, again=None if role in STATEFUL else ask)

    def in_parts(self, items: list[Item]) -> list[list[Item]]:
        """Fixed batches of `rollout.chunk_prompts`: what one message carries, and what is computed together."""
        size = self.settings.rollout.chunk_prompts
        return [items[first:first + size] for first in range(0, len(items), size)]

    async def submit(self, role: str, message: Any, what: str) -> Any:
        """The answer of a member of `role`. Raises ArraysGone when arrays of `message` died with their holder."""
        try:
            async with self.turn(side_of(role, message), what):
                return await self.fleet.submit(role, message, deadline_s=self.settings.run.deadline_s, what=what)
        except BusError as error:
            if isinstance(error, BulkGone) or (isinstance(error, RemoteError) and error.kind == BulkGone.__name__):
                raise ArraysGone(f"arrays for {what} are gone with the actor that held them: {error}") from error
            raise

    def turn(self, side: Side | None, what: str) -> AbstractAsyncContextManager[Any]:
        """Inside, the GPU is `side`'s. Nothing where nobody takes turns, or for what needs none."""
        return nullcontext() if self._hand_off is None or side is None else self._hand_off.turn(side, what)

    def questions(self) -> list[dict[str, Any]]:
        """See Fleet.questions."""
        return [*self.fleet.questions(), *(self._hand_off.questions() if self._hand_off is not None else [])]

    def _make_safe(self, *, at_end: bool) -> None:
        self.check_interrupted()
        due = self.step % self.settings.run.checkpoint_every == 0
        if due or at_end or self.stop_asked:
            self._checkpoint()
        if self.stop_asked and self.step < self.last_step:
            raise StopAsked(self.stop_asked[0])

    def _stateful(self) -> list[Any]:
        """The clients of the roles that are part of a checkpoint."""
        return [self.policy, self.replay_buffer, *([self.critic] if self.critic.present else [])]

    def _checkpoint(self) -> None:
        """Two phases: every stateful role writes its part; only when all have does the tracker move."""
        for step in sorted(self._stored):
            self._stored.pop(step).resolve()
        if self._simulators is not None:
            self._simulators.settle()
        with self.checkpoints.writing(self.step) as draft:
            for client in self._stateful():
                client.save(str(draft.directory), self.step).resolve()
            draft.finish(seed=self.settings.run.seed, step=self.step, dispatched_through=self.dispatched_through,
                         buffered=self.ledger.buffered_keys())


def _heard(task: asyncio.Task[Any]) -> None:
    """Its failure is looked at here, so that one which nobody waits for any more is not reported as forgotten."""
    if not task.cancelled():
        task.exception()
