"""The supervisor's decisions: what happened and when in, what to do out. No processes, no clock, no await.

One child's life:

    waiting -> starting -> ready -> stopping (asked) ---> down
       ^          |          |          `-> killed --'
       |          `----------+-> killed (stuck, not ready in time)
       `---- ended by itself, and the policy starts it again

Guarantees: a child has at most one living incarnation; children start in order, each when those before it are ready,
and stop in reverse order, one at a time; every start and every stop is bounded; more than `intensity` restarts within
`period_s` end everything with a reason. What an older incarnation says changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum

from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.child_state import Child, Fate, State
from cosmos_actor.actors.decisions import (
    Abandon,
    Decision,
    End,
    Ended,
    EndKind,
    Kill,
    Restarting,
    Start,
    Stopping,
    Terminate,
)
from cosmos_actor.actors.restart_policy import Outcome, Restart, RestartLimits, RestartWindow, Strategy

HISTORY_KEPT = 100
"""Events that an illegal one is printed with."""
KILL_WAIT_S = 5.0
"""How long a killed process may take to go. One in an uninterruptible wait must not hold a stop for ever."""


class Phase(Enum):
    NEW = "new"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class IllegalEvent(AssertionError):
    """An event that can not happen in this state: a fault of the caller. Its text carries the history."""


class Supervision:
    """See the module. Times are seconds of one clock that does not go back."""

    def __init__(self, specs: Sequence[ChildSpec], *, strategy: Strategy = Strategy.ONE_FOR_ONE,
                 limits: RestartLimits | None = None) -> None:
        self.phase = Phase.NEW
        self.children: dict[str, Child] = {}
        self.end: End | None = None
        self._strategy = strategy
        self._limits = limits or RestartLimits()
        self._window = RestartWindow(self._limits.period_s)
        self._stop_by = 0.0
        self._now = float("-inf")
        self._names: set[str] = set()
        self._abandoned: set[tuple[str, int]] = set()
        self._history: deque[str] = deque(maxlen=HISTORY_KEPT)
        self._out: list[Decision] = []
        self._counts = {"starts": 0, "restarts": 0, "kills": 0, "stale_events": 0}
        for spec in specs:
            self._admit(spec, tuple(self.children) if spec.after is None else spec.after)

    # ---- events

    def start(self, now: float) -> list[Decision]:
        self._note(now, "start")
        if self.phase is not Phase.NEW:
            raise self._illegal("start", f"the supervisor is {self.phase.value}")
        self.phase = Phase.RUNNING
        return self._advance()

    def ready(self, actor: str, incarnation: int, now: float) -> list[Decision]:
        """The child does its work from now on. A second time changes nothing."""
        self._note(now, f"ready {actor}#{incarnation}")
        child = self._current("ready", actor, incarnation)
        if child is not None and child.state is State.STARTING:
            child.state, child.proven, child.deadline = State.READY, True, None
            self._heard(child, 0.0)
        return self._advance()

    def heartbeat(self, actor: str, incarnation: int, now: float, *, progress: str = "", busy_s: float = 0.0) -> None:
        """Its working loop turns. It may be silent `busy_s` longer than usual (a compile, a checkpoint)."""
        self._now = max(self._now, now)
        child = self._current("heartbeat", actor, incarnation)
        if child is not None:
            child.progress = progress or child.progress
            self._heard(child, busy_s)

    def forgive(self, now: float) -> None:
        """The supervisor itself slept until `now` (it was stopped, or the machine was), so it heard nobody.

        Each child has its whole `heartbeat_s` again.
        """
        for child in self.children.values():
            child.silent_until = max(child.silent_until, now + (child.spec.heartbeat_s or 0.0))

    def exited(self, actor: str, incarnation: int, outcome: Outcome, reason: str, now: float) -> list[Decision]:
        """Its process, and all it had started, are gone."""
        self._note(now, f"exited {actor}#{incarnation} {outcome.value}: {reason}")
        child = self._current("exited", actor, incarnation)
        if child is None:
            return []
        if not child.alive:
            raise self._illegal(f"exited {actor}#{incarnation}", f"it is {child.state.value}")
        self._gone(child, outcome, reason)
        return self._advance()

    def kill(self, actor: str, reason: str, now: float) -> list[Decision]:
        """Kill a child that is no good; the policy then decides as for any abnormal end. Without a process: nothing."""
        self._note(now, f"kill {actor}: {reason}")
        child = self._known("kill", actor)
        if child.alive and child.state is not State.KILLED:
            self._kill(child, reason)
        return self._advance()

    def add(self, spec: ChildSpec, now: float) -> list[Decision]:
        """A new last child, started at once."""
        self._note(now, f"add {spec.actor}")
        if self.phase not in (Phase.NEW, Phase.RUNNING):
            raise self._illegal(f"add {spec.actor}", f"the supervisor is {self.phase.value}")
        self._admit(spec, spec.after or ())
        self.children[spec.actor].added = self.phase is Phase.RUNNING
        return self._advance() if self.phase is Phase.RUNNING else []

    def remove(self, actor: str, now: float) -> list[Decision]:
        """Stop a child and forget it."""
        self._note(now, f"remove {actor}")
        self._plan(self._known("remove", actor), Fate.FORGET)
        return self._advance()

    def stop(self, reason: str, now: float) -> list[Decision]:
        """Stop everything. A second time changes nothing."""
        self._note(now, f"stop: {reason}")
        self._stop(End(EndKind.STOPPED, reason))
        return self._advance()

    def tick(self, now: float) -> list[Decision]:
        """Time went by."""
        self._now = max(self._now, now)
        for child in list(self.children.values()):
            self._check_deadline(child)
            self._check_heartbeat(child)
        if self.phase is Phase.STOPPING and self._now >= self._stop_by:
            for child in self.children.values():
                if child.alive and child.state is not State.KILLED:
                    self._kill(child, f"the stop took longer than {self._limits.stop_s:g} s")
        return self._advance()

    # ---- views

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if nothing else happens before; None: never."""
        times = []
        for child in self.children.values():
            if self.phase is Phase.STOPPING and child.alive and child.state is not State.KILLED:
                times.append(self._stop_by)
            if child.deadline is not None:
                times.append(child.deadline)
            if child.state is State.READY and child.spec.heartbeat_s is not None:
                times.append(child.silent_until)
            if child.state is State.WAITING and self.phase is Phase.RUNNING and child.not_before > self._now:
                times.append(child.not_before)
        return min(times, default=None)

    def all_ready(self) -> bool:
        """Every child that is wanted is ready."""
        return self.phase is Phase.RUNNING and all(
            child.state in (State.READY, State.DOWN) for child in self.children.values())

    def statistics(self) -> dict[str, int]:
        return dict(self._counts)

    # ---- what follows from an event

    def _gone(self, child: Child, outcome: Outcome, reason: str) -> None:
        child.state, child.deadline, fate = State.DOWN, None, child.fate
        child.kill_reason, child.fate = None, None
        if fate is not None:
            self._settle(child, fate)
        elif self.phase is Phase.RUNNING:
            self._ended_by_itself(child, outcome, reason)

    def _ended_by_itself(self, child: Child, outcome: Outcome, reason: str) -> None:
        spec = child.spec
        restart = spec.restart.after(outcome)
        if not child.proven and child.incarnation == 1 and (restart or outcome is Outcome.ABNORMAL):
            self._failed_to_start(child, reason)
        elif restart:
            self._restart(child, reason)
        elif spec.significant:
            self._stop(End(EndKind.FINISHED, f"{spec.actor} {reason}"))
        elif spec.restart is Restart.TEMPORARY:
            del self.children[spec.actor]

    def _failed_to_start(self, child: Child, reason: str) -> None:
        """A job that never stood ends; a child that was added to a standing one is only forgotten. As in OTP."""
        if child.added:
            del self.children[child.spec.actor]
        else:
            self._stop(End(EndKind.FAILED_TO_START, f"{child.spec.actor} failed to start: {reason}"))

    def _restart(self, child: Child, reason: str) -> None:
        actor, limits = child.spec.actor, self._limits
        restarts = self._window.add(self._now)
        if restarts > limits.intensity:
            self._stop(End(EndKind.GAVE_UP, f"gave up: {restarts} restarts within {limits.period_s:g} s, more than "
                                            f"{limits.intensity}; the last: {actor} {reason}"))
            return
        self._counts["restarts"] += 1
        delay_s = limits.back_off_s(child.restarts.add(self._now))
        group = [actor]
        if not child.spec.alone:
            sharing = [name for name, other in self.children.items() if not other.spec.alone]
            group = self._strategy.group(sharing, actor)
        self._wait(child, delay_s, group)
        self._out.append(Restarting(actor, delay_s, reason))
        for name in group:
            if name != actor:
                self._restart_along(self.children[name], group)

    def _restart_along(self, child: Child, group: list[str]) -> None:
        """Its group is started again, so it is too; a temporary child is only stopped."""
        if child.spec.restart is Restart.TEMPORARY:
            self._plan(child, Fate.FORGET)
        elif child.alive:
            child.after = self._earlier(child, group)
            self._plan(child, Fate.RESTART)
        else:
            self._wait(child, 0.0, group)

    def _stop(self, end: End) -> None:
        if self.phase in (Phase.STOPPING, Phase.ENDED):
            return
        self.phase, self.end, self._stop_by = Phase.STOPPING, end, self._now + self._limits.stop_s
        self._out.append(Stopping(end))
        for child in self.children.values():
            self._plan(child, Fate.DOWN)

    def _plan(self, child: Child, fate: Fate) -> None:
        """It shall not run on: `fate` follows now, or once its process is gone."""
        if child.alive:
            child.fate = fate
        else:
            self._settle(child, fate)

    def _settle(self, child: Child, fate: Fate) -> None:
        if fate is Fate.FORGET:
            self.children.pop(child.spec.actor, None)
        else:
            child.state = State.WAITING if fate is Fate.RESTART else State.DOWN

    def _wait(self, child: Child, delay_s: float, group: list[str]) -> None:
        child.state, child.not_before, child.after = State.WAITING, self._now + delay_s, self._earlier(child, group)

    def _earlier(self, child: Child, group: list[str]) -> tuple[str, ...]:
        """Whom of its group it waits for."""
        before = group[:group.index(child.spec.actor)]
        return tuple(name for name in before if child.spec.after is None or name in child.spec.after)

    def _advance(self) -> list[Decision]:
        """Take the next steps: stops before starts, stops in reverse order and one at a time."""
        leaving = [child for child in self.children.values() if child.alive and child.fate is not None]
        if leaving:
            if not any(child.state in (State.STOPPING, State.KILLED) for child in leaving):
                self._terminate(leaving[-1])
        elif self.phase is Phase.STOPPING and not any(child.alive for child in self.children.values()):
            self.phase = Phase.ENDED
            assert self.end is not None
            self._out.append(Ended(self.end))
        elif self.phase is Phase.RUNNING:
            for child in self.children.values():
                if child.state is State.WAITING and child.not_before <= self._now and self._may_start(child):
                    self._begin(child)
        out, self._out = self._out, []
        return out

    def _may_start(self, child: Child) -> bool:
        before = [self.children[name] for name in child.after if name in self.children]
        return all(other.state in (State.READY, State.DOWN) for other in before)

    # ---- steps of one child

    def _begin(self, child: Child) -> None:
        child.state, child.deadline = State.STARTING, self._now + child.spec.start_s
        child.incarnation += 1
        child.progress = ""
        self._counts["starts"] += 1
        self._out.append(Start(child.spec.actor, child.incarnation))

    def _terminate(self, child: Child) -> None:
        child.state, child.deadline = State.STOPPING, self._now + child.spec.shutdown_s
        self._out.append(Terminate(child.spec.actor))

    def _kill(self, child: Child, reason: str) -> None:
        child.state, child.deadline, child.kill_reason = State.KILLED, self._now + KILL_WAIT_S, reason
        self._counts["kills"] += 1
        self._out.append(Kill(child.spec.actor, reason))

    def _check_deadline(self, child: Child) -> None:
        if child.deadline is None or self._now < child.deadline:
            return
        if child.state is State.STARTING:
            self._kill(child, f"not ready {child.spec.start_s:g} s after its start")
        elif child.state is State.STOPPING:
            self._kill(child, f"did not stop within {child.spec.shutdown_s:g} s")
        elif child.state is State.KILLED:
            reason = f"{child.kill_reason}; still there {KILL_WAIT_S:g} s after SIGKILL"
            self._abandoned.add((child.spec.actor, child.incarnation))
            self._out.append(Abandon(child.spec.actor))
            self._gone(child, Outcome.ABNORMAL, reason)

    def _check_heartbeat(self, child: Child) -> None:
        if child.state is State.READY and child.spec.heartbeat_s is not None and self._now >= child.silent_until:
            last = f", last seen at {child.progress}" if child.progress else ""
            self._kill(child, f"stuck: no heartbeat for {self._now - child.heard_at:.1f} s{last}")

    def _heard(self, child: Child, busy_s: float) -> None:
        child.heard_at = self._now
        child.silent_until = self._now + (child.spec.heartbeat_s or 0.0) + busy_s

    # ---- which events are legal

    def _admit(self, spec: ChildSpec, after: tuple[str, ...]) -> None:
        unknown = [name for name in after if name not in self.children]
        if spec.actor in self.children or unknown:
            raise ValueError(f"{spec.actor} is named twice" if not unknown else
                             f"{spec.actor} can not wait for {', '.join(unknown)}: name them earlier")
        self._names.add(spec.actor)
        self.children[spec.actor] = Child(spec, after, restarts=RestartWindow(self._limits.period_s))

    def _current(self, event: str, actor: str, incarnation: int) -> Child | None:
        """The child, or None when a life that is over speaks; raises for one that never was."""
        child = self.children.get(actor)
        if actor not in self._names:
            raise self._illegal(f"{event} {actor}#{incarnation}", "there never was such a child")
        if child is None or incarnation < child.incarnation or (actor, incarnation) in self._abandoned:
            self._counts["stale_events"] += 1
            return None
        if incarnation > child.incarnation or incarnation < 1:
            raise self._illegal(f"{event} {actor}#{incarnation}", f"the last one started is #{child.incarnation}")
        return child

    def _known(self, event: str, actor: str) -> Child:
        if actor not in self.children:
            raise self._illegal(f"{event} {actor}", f"the children are {', '.join(self.children) or 'none'}")
        return self.children[actor]

    def _note(self, now: float, event: str) -> None:
        if now < self._now:
            raise self._illegal(event, f"it is {self._now:.3f} already, and the event is of {now:.3f}")
        self._now = now
        self._history.append(f"{now:.3f} {event}")

    def _illegal(self, event: str, why: str) -> IllegalEvent:
        lines = "\n  ".join(self._history)
        return IllegalEvent(f"illegal event: {event}, but {why}. History:\n  {lines}")
