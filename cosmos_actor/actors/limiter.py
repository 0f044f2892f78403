"""When samples may be asked for, and when a step may be trained: the one limiter between rollout and policy. Pure.

    opened(step) -> dispatched(groups) -> stored | gone(reason) -> taken (trained) | gone("stale")

Legend
    step      number of an update; step s is trained with the weights at version s - 1
    version   of the weights when a group was asked for; its staleness at step s is s - 1 - version
    own       groups of the step that is being waited for;  late: groups of a step that was trained without them

Guarantees: no step is trained with a group that is more than `max_staleness` versions old; samples are asked for at
most `ahead` steps ahead; a `Hold` names what is under way and would end it, or the time at which it ends. So
a step whose groups all come or are given up ends in `Go` or in `GiveUp` with a reason, whatever the settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

AtBound = Literal["pace", "wait", "drop"]
Straggler = Literal["short", "redispatch", "drop"]
Shortfall = Literal["replace", "short"]

MOST_ASKS = 3
"""Members that one group is asked of, the first included. Without a bound a prompt that is slow everywhere would fill
every rollout with copies of itself."""
SHOWN = 8
"""Groups named in a fact. A step of a thousand groups would make a status of a megabyte."""


@dataclass(frozen=True, kw_only=True)
class RateLimits:
    """What `Limiter` decides by."""

    groups: int
    """Groups that a step trains."""
    max_staleness: int = 0
    ahead: int | None = None
    """Steps that samples are asked for ahead; None: `max_staleness`."""
    samples_per_insert: float = 1.0
    min_groups: int = 1
    at_bound: AtBound = "pace"
    straggler_s: float = 0.0
    straggler: Straggler = "short"
    shortfall: Shortfall = "replace"

    @property
    def steps_ahead(self) -> int:
        return self.max_staleness if self.ahead is None else self.ahead

    @property
    def groups_asked(self) -> int:
        """Groups that are asked for in order to train `groups`."""
        return ceil(self.groups / self.samples_per_insert - 1e-9)


# ---- decisions


@dataclass(frozen=True)
class Go:
    """Train now, with so many groups."""

    groups: int


@dataclass(frozen=True)
class Hold:
    """Wait for what is under way, or until a time of the caller's clock. Look again after each event."""

    why: str
    until: float | None = None


@dataclass(frozen=True)
class AskAgain:
    """Ask another member for these groups as well; the first answer counts."""

    groups: tuple[str, ...]


@dataclass(frozen=True)
class Drop:
    """Do not wait for these groups any more, and refuse them when they come. The caller says `gone`."""

    groups: tuple[str, ...]


@dataclass(frozen=True)
class Replace:
    """Ask for `count` new prompts for the step, numbered from `first` among its replacements; that is an `opened`."""

    first: int
    count: int


@dataclass(frozen=True)
class GiveUp:
    """Nothing can bring the groups that the step needs: the job ends with this reason."""

    reason: str


Decision = Go | Hold | AskAgain | Drop | Replace | GiveUp


@dataclass
class _Group:
    name: str
    step: int
    version: int
    asked_at: float
    asks: int = 1


@dataclass(frozen=True)
class _Wait:
    """Somebody waits since a time; `why` is the newest decision's."""

    step: int
    since: float
    why: str = ""


class Limiter:
    """See the module. Times are of one clock that does not go back; a group's name is unique in a life of the job."""

    def __init__(self, limits: RateLimits) -> None:
        self.limits = limits
        self._opened: Counter[int] = Counter()
        self._under_way: dict[str, _Group] = {}
        self._stored: dict[str, _Group] = {}
        self._replaced: Counter[int] = Counter()
        self._lost: Counter[str] = Counter()
        self._training: _Wait | None = None
        self._asking: _Wait | None = None
        self._counts: Counter[str] = Counter()

    # ---- events

    def restored(self, groups: Iterable[tuple[str, int, int]]) -> None:
        """The job goes on from a checkpoint: exactly these (name, step, version) are stored, nothing is under way."""
        for table in (self._opened, self._under_way, self._replaced, self._lost):
            table.clear()
        self._stored = {name: _Group(name, step, version, 0.0) for name, step, version in groups}
        self._training = self._asking = None

    def opened(self, step: int) -> None:
        """Groups of `step` are being asked for; `dispatched` follows, once for each `opened`."""
        self._opened[step] += 1

    def dispatched(self, step: int, groups: Iterable[str], version: int, now: float) -> None:
        """These groups are asked for, under weights `version`."""
        self._opened[step] -= 1
        made = {name: _Group(name, step, version, now) for name in groups}
        self._under_way.update(made)
        self._counts["asked"] += len(made)

    def stored(self, groups: Iterable[str]) -> None:
        """They are in the replay buffer. One that is not under way was given up before: nothing changes."""
        for name in groups:
            group = self._under_way.pop(name, None)
            if group is not None:
                self._stored[name] = group
                self._counts["stored"] += 1

    def gone(self, groups: Iterable[str], reason: str) -> None:
        """They will never be trained. `reason` is counted, so it has no numbers in it."""
        for name in groups:
            if self._under_way.pop(name, None) or self._stored.pop(name, None):
                self._lost[reason] += 1
                self._counts[f"gone/{reason}"] += 1

    def taken(self, groups: Collection[str]) -> None:
        """The replay buffer gave them out to be trained."""
        for name in groups:
            self._stored.pop(name, None)
        self._counts["trained"] += len(groups)

    # ---- decisions

    def may_ask(self, step: int, in_hand: int, now: float) -> Go | Hold:
        """Whether the samples of `step` may be asked for while step `in_hand` is being done."""
        limits = self.limits
        if step > in_hand + limits.steps_ahead:
            return Hold(f"step {step} is more than {limits.steps_ahead} ahead of step {in_hand}")
        paced = [group for group in self._late(in_hand) if not self._too_old(group, in_hand)]
        if limits.at_bound != "pace" or not paced:
            self._asking = None
            return Go(limits.groups_asked)
        why = f"late groups: {_named(paced)}"
        self._asking = _Wait(step, self._asking.since if self._asking else now, why)
        return Hold(why)

    def train(self, step: int, now: float) -> Decision:
        """What to do so that `step` can be trained. Ask again after each event, and when a `Hold` is over."""
        if self._training is None or self._training.step != step:
            self._training = _Wait(step, now)
        decision = self._decide(step, self._training.since, now)
        if isinstance(decision, Go):
            self._note_start(step, decision.groups)
        elif isinstance(decision, Hold):
            self._training = _Wait(step, self._training.since, decision.why)
        return decision

    def _decide(self, step: int, since: float, now: float) -> Decision:
        limits, own, late = self.limits, self._own(step), self._late(step)
        if self._opened[step] > 0:
            return Hold(f"prompts of step {step}")
        ready = sum(group.step <= step and not self._too_old(group, step) for group in self._stored.values())
        held = self._held(step, [*own, *late])
        if ready >= limits.groups and held is None:
            return Go(limits.groups)
        missing = limits.groups - ready - len(own)
        left = limits.groups - self._replaced[step]
        if limits.shortfall == "replace" and missing > 0 and left > 0:
            return self._replace(step, min(missing, left))
        if own:
            return self._for_stragglers(own, ready, held, since, now)
        if held is not None:
            return held
        if ready >= max(1, limits.min_groups):
            return Go(min(ready, limits.groups))
        useful = [group for group in late if not self._too_old(group, step)]
        if useful:
            return Hold(f"late groups: {_named(useful)}")
        return GiveUp(self._nothing_left(step, ready))

    def _for_stragglers(self, own: list[_Group], ready: int, held: Hold | None, since: float, now: float) -> Decision:
        """Groups of the step are under way. A deadline runs from when the step waits, or a group was asked for."""
        limits = self.limits
        waiting = Hold(f"{len(own)} of {limits.groups} groups: {_named(own)}") if held is None else held
        if limits.straggler_s <= 0:
            return waiting
        due_at = {group.name: max(since, group.asked_at) + limits.straggler_s * group.asks for group in own}
        due = [group for group in own if due_at[group.name] <= now]
        if limits.straggler == "redispatch":
            due = [group for group in due if group.asks < MOST_ASKS]
            own = [group for group in own if group.asks < MOST_ASKS]
        if due and limits.straggler == "short" and ready >= max(1, limits.min_groups) and held is None:
            return Go(min(ready, limits.groups))
        if due and limits.straggler == "redispatch":
            return self._ask_again(due)
        if due and limits.straggler == "drop":
            return Drop(tuple(group.name for group in due))
        times = [due_at[group.name] for group in own if due_at[group.name] > now]
        return Hold(waiting.why, min(times, default=None))

    def _ask_again(self, due: list[_Group]) -> AskAgain:
        for group in due:
            group.asks += 1
        self._counts["redispatched"] += len(due)
        return AskAgain(tuple(group.name for group in due))

    def _replace(self, step: int, count: int) -> Replace:
        first = self._replaced[step]
        self._replaced[step] += count
        self._opened[step] += 1
        self._counts["replaced"] += count
        return Replace(first, count)

    def _held(self, step: int, under_way: list[_Group]) -> Hold | None:
        """With `wait`: an update must not make a group too old that is still under way."""
        if self.limits.at_bound != "wait":
            return None
        lost = [group for group in under_way if not self._too_old(group, step) and self._too_old(group, step + 1)]
        return Hold(f"groups that update {step} would make too old: {_named(lost)}") if lost else None

    def _note_start(self, step: int, groups: int) -> None:
        self._training = None
        self._lost.clear()
        self._counts["left_behind"] += len(self._own(step))
        self._counts["short_steps"] += groups < self.limits.groups

    def _nothing_left(self, step: int, ready: int) -> str:
        lost = ", ".join(f"{count} {reason}" for reason, count in sorted(self._lost.items())) or "none"
        return (f"step {step} has {ready} of {self.limits.groups} groups and needs {max(1, self.limits.min_groups)}; "
                f"no other is under way (lost: {lost}; replaced: {self._replaced[step]})")

    # ---- views

    def waits(self, now: float) -> list[dict[str, Any]]:
        """Who waits for what since when, by which rule: plain objects, empty while nothing is held back."""
        facts = []
        if self._training is not None and self._training.why:
            facts.append(self._fact("policy", f"update {self._training.step}", self._training, now))
        if self._asking is not None:
            facts.append(self._fact("rollout", f"prompts of step {self._asking.step}", self._asking, now))
        return facts

    def _fact(self, who: str, what: str, wait: _Wait, now: float) -> dict[str, Any]:
        limits = self.limits
        return {"who": who, "waits_to_do": what, "for": wait.why, "for_s": round(now - wait.since, 2),
                "under_way": len(self._under_way), "stored": len(self._stored), "at_bound": limits.at_bound,
                "straggler": limits.straggler if limits.straggler_s > 0 else "none"}

    def statistics(self) -> dict[str, int]:
        """Counts of groups since the start (`short_steps`: of steps), and how many are under way and stored now."""
        return {**{name: count for name, count in sorted(self._counts.items()) if count},
                "under_way": len(self._under_way), "in_buffer": len(self._stored)}

    def under_way(self) -> list[str]:
        return list(self._under_way)

    def _own(self, step: int) -> list[_Group]:
        return [group for group in self._under_way.values() if group.step == step]

    def _late(self, step: int) -> list[_Group]:
        return [group for group in self._under_way.values() if group.step < step]

    def _too_old(self, group: _Group, step: int) -> bool:
        """Whether it may not be part of `step` any more."""
        return step - 1 - group.version > self.limits.max_staleness


def _named(groups: list[_Group]) -> str:
    names = sorted(group.name for group in groups)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
