"""The limiter keeps its bounds, never holds for ever, and says who waits for what."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cosmos_actor.actors.limiter import MOST_ASKS, AskAgain, Drop, GiveUp, Go, Hold, Limiter, RateLimits, Replace

FOUR = RateLimits(groups=4)


def names(step: int, count: int = 4) -> list[str]:
    return [f"g{step}-{place}" for place in range(count)]


def asked(limits: RateLimits = FOUR, *steps: int, now: float = 0.0, version: int | None = None) -> Limiter:
    """A limiter with the groups of `steps` under way, each asked for at the version before it unless said."""
    made = Limiter(limits)
    for step in steps or (1,):
        made.opened(step)
        made.dispatched(step, names(step), step - 1 if version is None else version, now)
    return made


def late(limits: RateLimits, now: float = 0.0) -> Limiter:
    """Step 1 was trained without its last group, which is still under way."""
    made = asked(replace(limits, straggler_s=1.0, straggler="short"))
    made.stored(names(1)[:3])
    assert isinstance(made.train(1, now), Hold) and made.train(1, now + 1.0) == Go(3)
    made.taken(names(1)[:3])
    return made


# ---- the ordinary course


def test_a_step_is_trained_when_all_its_groups_are_stored():
    limiter = asked()
    assert isinstance(limiter.train(1, 0.0), Hold)
    limiter.stored(names(1)[:3])
    assert isinstance(limiter.train(1, 1e9), Hold), "without a deadline for stragglers it waits for all of them"
    limiter.stored(names(1)[3:])
    assert limiter.train(1, 0.0) == Go(4)


def test_prompts_that_are_still_fetched_are_waited_for():
    limiter = Limiter(FOUR)
    limiter.opened(1)
    assert limiter.train(1, 0.0) == Hold("prompts of step 1")


def test_samples_are_asked_for_at_most_max_staleness_steps_ahead():
    limiter = Limiter(RateLimits(groups=4, max_staleness=2))
    assert [isinstance(limiter.may_ask(step, 5, 0.0), Go) for step in (5, 6, 7, 8)] == [True, True, True, False]


def test_or_fewer_so_that_late_groups_are_still_fresh_enough():
    limiter = Limiter(RateLimits(groups=4, max_staleness=2, ahead=0))
    assert [isinstance(limiter.may_ask(step, 5, 0.0), Go) for step in (5, 6)] == [True, False]


@pytest.mark.parametrize(("share", "count"), [(1.0, 4), (0.8, 5), (0.5, 8), (0.34, 12)])
def test_samples_per_insert_is_the_share_of_what_is_asked_for_that_is_trained(share, count):
    limiter = Limiter(RateLimits(groups=4, samples_per_insert=share))
    assert limiter.may_ask(1, 1, 0.0) == Go(count)


def test_of_more_than_it_needs_a_step_takes_the_first():
    limiter = Limiter(RateLimits(groups=4, samples_per_insert=0.5))
    limiter.opened(1)
    limiter.dispatched(1, names(1, 8), 0, 0.0)
    limiter.stored(names(1, 8)[4:])
    assert limiter.train(1, 0.0) == Go(4) and limiter.statistics()["left_behind"] == 4


def test_samples_for_later_steps_are_not_taken_for_this_one():
    limiter = asked(RateLimits(groups=4, max_staleness=1), 1, 2)
    limiter.stored(names(2))
    assert isinstance(limiter.train(1, 0.0), Hold)


def test_after_a_restore_only_what_the_checkpoint_holds_is_there():
    limiter = asked(FOUR, 1, 2)
    limiter.restored([(name, 1, 0) for name in names(1)])
    assert limiter.train(1, 0.0) == Go(4) and limiter.under_way() == []


# ---- groups that never come


def test_what_is_gone_is_replaced_as_often_as_a_step_has_groups():
    limiter = asked()
    limiter.stored(names(1)[:3])
    limiter.gone(names(1)[3:], "quarantined")
    for turn in range(4):
        assert limiter.train(1, 0.0) == Replace(turn, 1)
        assert isinstance(limiter.train(1, 0.0), Hold)
        limiter.dispatched(1, [f"r{turn}"], 0, 0.0)
        limiter.gone([f"r{turn}"], "quarantined")
    assert limiter.train(1, 0.0) == Go(3)


def test_or_the_step_is_short_where_that_is_asked_for():
    limiter = asked(RateLimits(groups=4, shortfall="short"))
    limiter.gone(names(1)[:1], "quarantined")
    assert isinstance(limiter.train(1, 0.0), Hold)
    limiter.stored(names(1)[1:])
    assert limiter.train(1, 0.0) == Go(3) and limiter.statistics()["short_steps"] == 1


def test_below_the_minimum_the_job_ends_with_what_became_of_the_groups():
    limiter = asked(RateLimits(groups=4, min_groups=3, shortfall="short"))
    limiter.stored(names(1)[:2])
    limiter.gone(names(1)[2:], "quarantined")
    assert limiter.train(1, 0.0) == GiveUp(
        "step 1 has 2 of 4 groups and needs 3; no other is under way (lost: 2 quarantined; replaced: 0)")


# ---- stragglers


def test_a_straggler_has_until_its_deadline_counted_from_when_the_step_waits():
    limiter = asked(RateLimits(groups=4, straggler_s=10.0))
    limiter.stored(names(1)[:3])
    assert limiter.train(1, 100.0).until == 110.0
    assert isinstance(limiter.train(1, 109.0), Hold)
    assert limiter.train(1, 110.0) == Go(3)
    assert limiter.statistics()["left_behind"] == 1 and limiter.statistics()["short_steps"] == 1


def test_a_step_does_not_go_on_with_fewer_than_its_minimum():
    limiter = asked(RateLimits(groups=4, straggler_s=10.0, min_groups=4))
    limiter.stored(names(1)[:3])
    limiter.train(1, 0.0)
    assert limiter.train(1, 50.0) == Hold("1 of 4 groups: g1-3")


def test_a_straggler_is_asked_again_a_bounded_number_of_times():
    limiter = asked(RateLimits(groups=4, straggler_s=10.0, straggler="redispatch"))
    limiter.stored(names(1)[:3])
    limiter.train(1, 0.0)
    asks = [limiter.train(1, now) for now in (10.0, 11.0, 20.0, 21.0, 1000.0)]
    assert [ask == AskAgain(("g1-3",)) for ask in asks] == [True, False, True, False, False]
    assert limiter.statistics()["redispatched"] == MOST_ASKS - 1
    limiter.stored(["g1-3"])
    assert limiter.train(1, 1001.0) == Go(4)


def test_a_straggler_that_is_dropped_is_refused_when_it_comes():
    limiter = asked(RateLimits(groups=4, straggler_s=10.0, straggler="drop", shortfall="short"))
    limiter.stored(names(1)[:3])
    limiter.train(1, 0.0)
    assert limiter.train(1, 10.0) == Drop(("g1-3",))
    limiter.gone(["g1-3"], "straggler")
    limiter.stored(["g1-3"])
    assert limiter.train(1, 10.0) == Go(3) and limiter.statistics()["gone/straggler"] == 1


# ---- what gives way at the bound


@pytest.mark.parametrize("at_bound", ["pace", "wait", "drop"])
def test_a_late_group_that_is_fresh_enough_is_trained(at_bound):
    limiter = late(RateLimits(groups=4, max_staleness=2, at_bound=at_bound))
    limiter.opened(2)
    limiter.dispatched(2, names(2), 1, 2.0)
    limiter.stored(["g1-3", *names(2)[:3]])
    assert limiter.train(2, 2.0) == Go(4)


def test_pace_asks_for_nothing_new_while_a_late_group_may_still_be_trained():
    limiter = late(RateLimits(groups=4, max_staleness=1, at_bound="pace"))
    assert limiter.may_ask(2, 2, 5.0) == Hold("late groups: g1-3")
    [fact] = limiter.waits(7.0)
    assert (fact["who"], fact["for"], fact["for_s"]) == ("rollout", "late groups: g1-3", 2.0)
    limiter.stored(["g1-3"])
    assert limiter.may_ask(2, 2, 8.0) == Go(4) and limiter.waits(8.0) == []


@pytest.mark.parametrize("at_bound", ["wait", "drop"])
def test_the_others_ask_on(at_bound):
    assert isinstance(late(RateLimits(groups=4, max_staleness=1, at_bound=at_bound)).may_ask(2, 2, 0.0), Go)


def test_wait_trains_nothing_that_would_make_a_group_under_way_too_old():
    limiter = late(RateLimits(groups=4, max_staleness=1, at_bound="wait"))
    limiter.opened(2)
    limiter.dispatched(2, names(2), 1, 2.0)
    limiter.stored(names(2))
    assert limiter.train(2, 1e6) == Hold("groups that update 2 would make too old: g1-3")
    limiter.stored(["g1-3"])
    assert limiter.train(2, 1e6) == Go(4)


def test_with_wait_and_no_staleness_no_step_is_short():
    limiter = asked(RateLimits(groups=4, at_bound="wait", straggler_s=1.0))
    limiter.stored(names(1)[:3])
    limiter.train(1, 0.0)
    assert isinstance(limiter.train(1, 1e6), Hold)


def test_drop_goes_on_and_a_group_that_is_too_old_does_not_count():
    limiter = late(RateLimits(groups=4, max_staleness=0, at_bound="drop", shortfall="short"))
    limiter.opened(2)
    limiter.dispatched(2, names(2), 1, 2.0)
    limiter.stored(["g1-3", *names(2)[:3]])
    assert isinstance(limiter.train(2, 2.0), Hold)
    limiter.stored(names(2)[3:])
    assert limiter.train(2, 2.0) == Go(4)


def test_who_waits_for_what_since_when():
    limiter = asked(RateLimits(groups=4, straggler_s=60.0))
    limiter.stored(names(1)[:1])
    limiter.train(1, 10.0)
    limiter.stored(names(1)[1:2])
    limiter.train(1, 12.0)
    assert limiter.waits(51.0) == [{
        "who": "policy", "waits_to_do": "update 1", "for": "2 of 4 groups: g1-2, g1-3", "for_s": 41.0, "under_way": 2,
        "stored": 2, "at_bound": "pace", "straggler": "short"}]
    limiter.stored(names(1)[2:])
    assert limiter.train(1, 52.0) == Go(4) and limiter.waits(52.0) == []


# ---- whatever the settings and whatever happens


LIMITS = st.builds(
    RateLimits, groups=st.integers(1, 4), max_staleness=st.integers(0, 2),
    samples_per_insert=st.sampled_from([1.0, 0.75, 0.5]), min_groups=st.integers(0, 4),
    ahead=st.sampled_from([None, 0, 1]), at_bound=st.sampled_from(["pace", "wait", "drop"]),
    straggler_s=st.sampled_from([0.0, 3.0]),
    straggler=st.sampled_from(["short", "redispatch", "drop"]), shortfall=st.sampled_from(["replace", "short"]),
).map(lambda limits: replace(limits, min_groups=min(limits.min_groups, limits.groups),
                              ahead=None if limits.ahead is None else min(limits.ahead, limits.max_staleness)))
DEADLINE_S = 40
"""Whatever is asked has an answer or an error by then, as in a job (`run.deadline_s`)."""


class Loop:
    """A recipe's loop over a limiter. Each group takes as long as `chance` says, and is stored or gone then."""

    def __init__(self, limits: RateLimits, chance: random.Random) -> None:
        self.limiter, self.limits, self.chance = Limiter(limits), limits, chance
        self.now = 0
        self.asked_through = 0
        self.version_of: dict[str, int] = {}
        self.ends: dict[str, tuple[int, bool]] = {}
        self.refused: set[str] = set()
        self.buffer: list[str] = []
        self.stored_in: dict[str, int] = {}
        """Group -> the step that was waited for when it came."""
        self.in_hand = 0
        self.opening: list[tuple[int, int, list[str], int]] = []

    def run(self, steps: int) -> str:
        for step in range(1, steps + 1):
            reason = self.do(step, steps)
            if reason:
                return reason
        return ""

    def do(self, step: int, last: int) -> str:
        self.in_hand = step
        while self.asked_through < min(step + self.limits.steps_ahead, last):
            decision = self.limiter.may_ask(self.asked_through + 1, step, self.now)
            if isinstance(decision, Hold) and self.asked_through >= step:
                break
            if isinstance(decision, Hold):
                self.pass_time(decision)
                continue
            self.asked_through += 1
            self.limiter.opened(self.asked_through)
            self.ask(self.asked_through, [f"g{self.asked_through:03d}-{n}" for n in range(decision.groups)], step)
        while not isinstance(decision := self.limiter.train(step, self.now), Go):
            if isinstance(decision, GiveUp):
                useful = [name for name in self.limiter.under_way() if name < f"g{step + 1:03d}"
                          and step - 1 - self.version_of[name] <= self.limits.max_staleness]
                assert useful == [] and decision.reason.startswith(f"step {step} has ")
                return decision.reason
            self.perform(decision, step)
        self.sample(decision.groups, step)
        return ""

    def ask(self, step: int, groups: list[str], in_hand: int) -> None:
        self.opening.append((self.now + self.chance.randint(0, 2), step, groups, in_hand - 1))
        self.open_due()

    def open_due(self) -> None:
        for entry in [entry for entry in self.opening if entry[0] <= self.now]:
            self.opening.remove(entry)
            _, step, groups, version = entry
            self.limiter.dispatched(step, groups, version, self.now)
            for name in groups:
                self.version_of[name] = version
                comes = self.chance.choice([1, 2, 3, 5, 9, DEADLINE_S])
                lost = comes == DEADLINE_S or self.chance.random() < 0.15
                self.ends[name] = (self.now + comes, not lost)

    def pass_time(self, hold: Hold) -> None:
        """To the next thing that happens. The assertion is the promise: a hold has an end."""
        times = [at for at, _ in self.ends.values()] + [entry[0] for entry in self.opening]
        times += [] if hold.until is None else [int(hold.until)]
        assert times, f"nothing ends this: {hold}, {self.limiter.statistics()}"
        assert min(times) > self.now, hold
        self.now = min(times)
        self.open_due()
        for name in [name for name, (at, _) in self.ends.items() if at <= self.now]:
            _, comes = self.ends.pop(name)
            if comes and name not in self.refused:
                self.limiter.stored([name])
                self.buffer.append(name)
                self.stored_in[name] = self.in_hand
            else:
                self.limiter.gone([name], "no answer")

    def perform(self, decision: Any, step: int) -> None:
        if isinstance(decision, Hold):
            self.pass_time(decision)
        elif isinstance(decision, Drop):
            self.refused.update(decision.groups)
            self.limiter.gone(decision.groups, "straggler")
        elif isinstance(decision, Replace):
            self.ask(step, [f"g{step:03d}-r{decision.first + n}" for n in range(decision.count)], step)
        else:
            assert isinstance(decision, AskAgain) and set(decision.groups) <= set(self.limiter.under_way())

    def sample(self, groups: int, step: int) -> None:
        """What the replay buffer does: too old ones go, the first by name are given out."""
        stale = [name for name in self.buffer if step - 1 - self.version_of[name] > self.limits.max_staleness]
        if self.limits.at_bound == "wait" and self.limits.straggler != "drop":  # more came than steps could take
            assert all(self.stored_in[name] < step for name in stale), "an update made it too old on its way"
        self.limiter.gone(stale, "stale")
        fresh = sorted(name for name in self.buffer if name not in stale)
        assert max(1, self.limits.min_groups) <= groups <= self.limits.groups and len(fresh) >= groups
        self.limiter.taken(fresh[:groups])
        self.buffer = fresh[groups:]


@settings(max_examples=150, deadline=None)
@given(LIMITS, st.integers(0, 1 << 32))
@example(RateLimits(groups=2, max_staleness=1, at_bound="wait", min_groups=0, straggler_s=3.0), 0)  # a surplus is lost
def test_a_run_never_stops_at_a_limit_without_a_reason(limits, seed):
    loop = Loop(limits, random.Random(seed))
    reason = loop.run(steps=5)
    assert reason == "" or "no other is under way" in reason
    counted = loop.limiter.statistics()
    gone = sum(count for name, count in counted.items() if name.startswith("gone/"))
    assert counted.get("asked", 0) == counted.get("trained", 0) + gone + counted["under_way"] + counted["in_buffer"]
