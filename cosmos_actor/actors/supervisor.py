"""The process that owns a job's processes: it does what the supervision decides and tells it what happened.

Everything runs on one asyncio loop; nothing here decides. Events go to events.jsonl and to `on_event`, one object
each, with time, event, and (where it is about one) actor and incarnation: started (pid, role, interpreter, number) ·
ready (after_s) · killing (reason) · exited (reason, outcome, exit_code, signal, uptime_s) · restarting (delay_s,
reason) · leftovers (pids) · keeper_replaced · stopping (kind, reason) · ended (kind, reason).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_actor.actors.child import ChildProcess, DeathPipe, kernel_oom_kills
from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.decisions import (
    Abandon,
    Decision,
    End,
    Ended,
    Kill,
    Restarting,
    Start,
    Stopping,
    Terminate,
)
from cosmos_actor.actors.errors import JobFailed, NotFound
from cosmos_actor.actors.exit_reason import ExitReason, could_not_start
from cosmos_actor.actors.json_lines import ForgivingWriter
from cosmos_actor.actors.keeper_process import KeeperProcess
from cosmos_actor.actors.restart_policy import RestartLimits, Strategy
from cosmos_actor.actors.run_directory import RunDirectory
from cosmos_actor.actors.supervision import Supervision
from cosmos_actor.bus.identity import new_incarnation

OVERSLEPT_S = 1.0
"""A timer later than this means that the supervisor itself slept, and its children's silence is not held against
them."""
OOM_LOOK_S = 1.0
"""How old the last look at the kernel's count of out-of-memory kills may be, while heartbeats come."""

Event = dict[str, Any]


@dataclass
class Life:
    """One incarnation: its number in the supervision, its id (NUMBER-UNIQUE) everywhere else."""

    actor: str
    number: int
    incarnation: str
    started_at: float
    process: ChildProcess | None = None


class Supervisor:
    """Owns the children of a job. Guarantee: when `stop` or `wait` returned, no process of the job is left.

    Usable on one loop, by one task at a time. Leaving it as a context manager stops everything. Events that the file
    system refuses are lost from events.jsonl, not from `on_event`; `on_trouble` hears of it.
    """

    def __init__(self, specs: Sequence[ChildSpec], *, run_directory: RunDirectory,
                 strategy: Strategy = Strategy.ONE_FOR_ONE, limits: RestartLimits | None = None,
                 clock: Callable[[], float] = time.monotonic,
                 on_event: Callable[[Event], None] = lambda event: None,
                 on_trouble: Callable[[str], None] = lambda text: None) -> None:
        self._core = Supervision(specs, strategy=strategy, limits=limits)
        self._run_directory = run_directory
        self._log = ForgivingWriter(run_directory.writer(run_directory.events), on_trouble)
        self._clock = clock
        self._on_event = on_event
        self._lives: dict[str, Life] = {}
        self._to_do: deque[Decision] = deque()
        self._doing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")
        self._ready = asyncio.Event()
        self._over = asyncio.Event()
        self._failure: BaseException | None = None
        self._oom = (float("-inf"), 0)
        self._stale_words = 0
        self._pipe: DeathPipe
        self._keeper: KeeperProcess

    # ---- the owner's side

    async def start(self) -> None:
        """Start the first children; the others follow as these get ready. Raises NotFound for a missing interpreter."""
        for child in self._core.children.values():
            _find_interpreter(child.spec)
        self._look_at_oom()
        self._pipe = DeathPipe()
        self._keeper = KeeperProcess(self._pipe.supervisor, self._run_directory.events,
                                     on_replaced=lambda: self._event("keeper_replaced", pid=self._keeper.pid))
        self._do(self._core.start(self._clock()))

    async def until_ready(self) -> None:
        """Return when all children are ready; each has its `start_s`. Raises JobFailed with the reason else."""
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure
        if self._core.end is not None and not self._core.end.ok:
            raise JobFailed(self._core.end.reason)

    async def stop(self, reason: str) -> End:
        """Stop all children in reverse order, in `limits.stop_s` and a few seconds; a second call only waits."""
        if self._failure is None:
            self._do(self._core.stop(reason, self._clock()))
        return await self.wait()

    async def wait(self) -> End:
        """Why it ended, once everything is gone."""
        await self._over.wait()
        if self._failure is not None:
            raise self._failure
        assert self._core.end is not None
        return self._core.end

    def add(self, spec: ChildSpec) -> None:
        """One more child, started now and stopped first."""
        _find_interpreter(spec)
        self._do(self._core.add(spec, self._clock()))

    def remove(self, actor: str) -> None:
        """Stop a child and forget it; its `exited` event says when it is gone."""
        self._do(self._core.remove(actor, self._clock()))

    def kill(self, actor: str, reason: str) -> None:
        """Kill a child for a named reason; the restart policy decides what follows."""
        self._do(self._core.kill(actor, reason, self._clock()))

    def forgive(self) -> None:
        """Nobody could be heard for a while: no child's silence until now counts."""
        self._core.forgive(self._clock())

    async def __aenter__(self) -> Supervisor:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop("its owner is done")

    # ---- what children say, as the registry hands it on

    def mark_ready(self, actor: str, incarnation: str) -> None:
        """This life does its work now. A word of a life that is over changes nothing."""
        life = self._spoken(actor, incarnation)
        if life is None or life.process is None:
            return
        before = self._core.children[actor].state
        decisions = self._core.ready(actor, life.number, self._clock())
        if self._core.children[actor].state is not before:
            self._event("ready", life, after_s=round(self._clock() - life.started_at, 3))
        self._do(decisions)

    def heartbeat(self, actor: str, incarnation: str, *, progress: str = "", busy_s: float = 0.0) -> None:
        """The child's working loop turns; it may be silent for `busy_s` longer than usual (a compile, a checkpoint)."""
        life = self._spoken(actor, incarnation)
        if life is None:
            return
        if self._clock() - self._oom[0] > OOM_LOOK_S:
            self._look_at_oom()
        self._core.heartbeat(actor, life.number, self._clock(), progress=progress, busy_s=busy_s)
        self._arm()

    # ---- views

    def children(self) -> list[dict[str, Any]]:
        """One object a child, in start order: actor, role, state, incarnation, pid, interpreter, starts, progress."""
        return [{
            "actor": actor, "role": child.spec.role, "state": child.state.value, "starts": child.incarnation,
            "incarnation": life.incarnation if (life := self._lives.get(actor)) else None,
            "pid": life.process.pid if life and life.process and child.alive else None,
            "interpreter": child.spec.command[0], "progress": child.progress,
        } for actor, child in self._core.children.items()]

    def statistics(self) -> dict[str, int]:
        return {**self._core.statistics(), "stale_words": self._stale_words}

    # ---- doing what was decided

    def _do(self, decisions: list[Decision]) -> None:
        """Carry out in order, also when carrying one out brings further ones."""
        self._to_do.extend(decisions)
        if self._doing:
            return
        self._doing = True
        try:
            while self._to_do:
                self._carry_out(self._to_do.popleft())
        finally:
            self._doing = False
        if self._core.all_ready():
            self._ready.set()
        self._arm()

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Start(actor, number):
                self._start_child(actor, number)
            case Terminate(actor):
                self._process(actor).terminate()
            case Kill(actor, reason):
                self._event("killing", self._lives[actor], reason=reason)
                self._process(actor).kill()
            case Abandon(actor):
                self._abandon(actor)
            case Restarting(actor, delay_s, reason):
                self._event("restarting", self._lives[actor], delay_s=delay_s, reason=reason)
            case Stopping(end):
                self._event("stopping", kind=end.kind.value, reason=end.reason)
            case Ended(end):
                self._spawn(self._finish(end))

    def _start_child(self, actor: str, number: int) -> None:
        spec = self._core.children[actor].spec
        life = self._lives[actor] = Life(actor, number, f"{number}-{new_incarnation()}", self._clock())
        try:
            life.process = ChildProcess(
                spec, life.incarnation, pipe=self._pipe, log=self._run_directory.log(actor, life.incarnation),
                on_end=lambda _: self._guarded(self._ended, life))
        except OSError as error:
            self._report_end(life, could_not_start(error))
            return
        self._keeper.born(life.process.pid)
        self._event("started", life, pid=life.process.pid, role=spec.role, interpreter=spec.command[0],
                    number=number)

    def _ended(self, life: Life) -> None:
        """A leader is gone. What it left behind goes before the supervision hears of it."""
        child, process = self._core.children[life.actor], self._process(life.actor)
        asked, because = child.fate is not None, child.kill_reason
        oom_kills = self._oom[1]
        self._look_at_oom()
        reason = process.explain(asked=asked, killed_because=because, out_of_memory=self._oom[1] > oom_kills)
        self._event_of_end(life, reason)
        self._spawn(self._bury(life, process, reason))

    async def _bury(self, life: Life, process: ChildProcess, reason: ExitReason) -> None:
        leftovers = await process.bury()
        if leftovers:
            self._event("leftovers", life, pids=sorted(leftovers))
        self._keeper.gone(process.pid)
        self._do(self._core.exited(life.actor, life.number, reason.outcome, reason.text, self._clock()))

    def _report_end(self, life: Life, reason: ExitReason) -> None:
        self._event_of_end(life, reason)
        self._do(self._core.exited(life.actor, life.number, reason.outcome, reason.text, self._clock()))

    def _abandon(self, actor: str) -> None:
        life, process = self._lives[actor], self._process(actor)
        process.abandon()
        self._event("exited", life, reason="killed, and did not go", outcome="abnormal", exit_code=None, signal=None)

    async def _finish(self, end: End) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._event("ended", kind=end.kind.value, reason=end.reason)
        await self._keeper.dismiss()
        self._pipe.close()
        self._ready.set()
        self._over.set()

    # ---- time

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._core.next_deadline()
        self._due = float("inf") if deadline is None else deadline
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._guarded, self._tick)

    def _tick(self) -> None:
        now = self._clock()
        if now - self._due > OVERSLEPT_S:
            self._core.forgive(now)
        self._do(self._core.tick(now))

    def _look_at_oom(self) -> None:
        self._oom = (self._clock(), kernel_oom_kills())

    # ---- small things

    def _process(self, actor: str) -> ChildProcess:
        process = self._lives[actor].process
        assert process is not None, f"{actor} has no process"
        return process

    def _spoken(self, actor: str, incarnation: str) -> Life | None:
        life = self._lives.get(actor)
        if life is None or life.incarnation != incarnation or actor not in self._core.children:
            self._stale_words += 1
            return None
        return life

    def _event_of_end(self, life: Life, reason: ExitReason) -> None:
        self._event("exited", life, reason=reason.text, outcome=reason.outcome.value, exit_code=reason.exit_code,
                    signal=reason.signal, uptime_s=round(self._clock() - life.started_at, 3))

    def _event(self, name: str, life: Life | None = None, **fields: Any) -> None:
        about = {"actor": life.actor, "incarnation": life.incarnation} if life else {}
        event = {"time": time.time(), "event": name, **about, **fields}
        self._log.append(event)
        self._on_event(event)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _guarded(self, step: Callable[..., None], *arguments: Any) -> None:
        """For what the loop calls: an error there would otherwise only be logged, and a child be without an owner."""
        try:
            step(*arguments)
        except Exception as error:  # any fault of the supervisor ends it, and the job with it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """A fault of the supervisor itself: the keeper ends all children, and `wait` raises the fault."""
        if self._failure is not None:
            return
        self._failure = error
        for life in self._lives.values():
            if life.process is not None:
                life.process.abandon()
        if self._timer is not None:
            self._timer.cancel()
        self._keeper.execute()
        self._pipe.close()
        self._ready.set()
        self._over.set()


def _find_interpreter(spec: ChildSpec) -> None:
    """Refuse before anything is started what could never start."""
    program = spec.command[0]
    if shutil.which(program, path={**spec.env}.get("PATH")) is None:
        raise NotFound(f"{spec.actor}: there is no program {program}", setting=f"{spec.role}.python")
