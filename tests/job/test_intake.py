"""The limiter's decisions as a job carries them out: one of a step's two parts is late, and what then happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.bus import RemoteError
from cosmos_actor.job.intake import ShortSample
from tests.job.small_job import Gate, SmallJob, small_job
from tests.waiting import eventually

ONE = 3
"""Trajectories of a group, which is a part here."""


class HoldsTheFirst(Gate):
    """The first who comes waits until it is open, the others do not."""

    async def pass_through(self) -> None:
        self.came += 1
        if self.came == 1:
            await self.open.wait()


@contextmanager
def late(folder: Path, *flags: str) -> Iterator[SmallJob]:
    """A job whose first step is asked for, and whose first part is held back."""
    with small_job(folder, "rollout.chunk_prompts=1", "limiter.straggler_s=0.5", *flags) as made:
        made.job.restore("the controller started")
        made.gates["rollout"] = HoldsTheFirst()
        made.do(made.gates["rollout"].open.clear)
        ask(made, 1)
        try:
            yield made
        finally:
            made.do(made.gates["rollout"].open.set)


def ask(small: SmallJob, step: int) -> None:
    """Under the weights of the step before."""
    job = small.job
    job.weights.published_step = step - 1
    job.expect(step, job.replay_buffer.put(job.reward.score(job.rollout.generate(job.data.tasks(step), step)), step))


def names(small: SmallJob, step: int) -> list[str]:
    return [group.group_id for group in small.job.replay_buffer.sample(step)]


def balance(small: SmallJob) -> dict[str, Any]:
    found = small.job.ledger.balance()
    return {name: found[name] for name in ("dispatched", "buffered", "in_flight", "dropped", "balanced")}


def test_short_the_step_goes_on_and_a_later_one_may_have_the_late_group(tmp_path):
    with late(tmp_path, "limiter.straggler=short", "run.max_staleness=1", "limiter.ahead=0") as small:
        assert names(small, 1) == ["g000001-1"]
        assert balance(small)["in_flight"] == ONE
        ask(small, 2)
        small.do(small.gates["rollout"].open.set)
        eventually(lambda: small.buffered_groups == 3, "the late group and those of step 2")
        assert names(small, 2) == ["g000001-0", "g000002-0"]
        assert balance(small)["balanced"] and balance(small)["dropped"] == {}


def test_a_group_that_comes_too_late_is_dropped_with_its_reason(tmp_path):
    with late(tmp_path, "limiter.straggler=short") as small:
        assert names(small, 1) == ["g000001-1"]
        small.do(small.gates["rollout"].open.set)
        eventually(lambda: small.buffered_groups == 1, "the late group")
        ask(small, 2)
        eventually(lambda: small.buffered_groups == 3, "the groups of step 2")
        assert names(small, 2) == ["g000002-0", "g000002-1"]
        assert balance(small)["dropped"] == {"stale: more than 0 versions old": ONE}


def test_asked_again_the_first_answer_counts_and_the_other_changes_nothing(tmp_path):
    with late(tmp_path, "limiter.straggler=redispatch") as small:
        assert names(small, 1) == ["g000001-0", "g000001-1"]
        small.do(small.gates["rollout"].open.set)
        ask(small, 2)
        eventually(lambda: small.buffered_groups == 2, "the groups of step 2")
        assert names(small, 2) == ["g000002-0", "g000002-1"]
        assert balance(small) == {"dispatched": 4 * ONE, "buffered": 4 * ONE, "in_flight": 0, "dropped": {},
                                  "balanced": True}


def test_dropped_it_is_replaced_and_refused_when_it_comes(tmp_path):
    with late(tmp_path, "limiter.straggler=drop") as small:
        assert names(small, 1) == ["g000001-1", "g000001-r0"]
        small.do(small.gates["rollout"].open.set)
        ask(small, 2)
        eventually(lambda: small.buffered_groups == 2, "the groups of step 2")
        assert names(small, 2) == ["g000002-0", "g000002-1"]
        assert balance(small)["dropped"] == {"straggler": ONE} and balance(small)["balanced"]


def test_when_nothing_can_come_any_more_the_job_ends_with_the_reason(tmp_path):
    with late(tmp_path, "limiter.straggler=drop", "limiter.shortfall=short", "limiter.min_groups=2") as small:
        with pytest.raises(ShortSample, match=r"step 1 has 1 of 2 groups and needs 2.*lost: 1 straggler.*min_groups"):
            small.job.wait_for(1)


def test_pace_makes_the_next_step_wait_for_the_late_group(tmp_path):
    with late(tmp_path, "run.max_staleness=1", "limiter.ahead=0") as small:
        small.job.dispatched_through = 1
        names(small, 1)
        leave = small.job.handle(small.job.intake.may_ask(2, 2), "leave")
        [fact] = eventually(small.job.waits, "a fact about the wait")
        assert (fact["who"], fact["waits_to_do"], fact["for"]) == (
            "rollout", "prompts of step 2", "late groups: g000001-0")
        assert not leave.done()
        small.do(small.gates["rollout"].open.set)
        assert leave.resolve(10.0) is True and list(small.job.dispatchable(2)) == [2]


def test_what_makes_a_part_fail_is_raised_where_its_step_is_waited_for(tmp_path):
    with late(tmp_path) as small:
        def fail(*arguments: Any, **options: Any) -> None:
            raise RemoteError("ValueError", "no such text")

        small.job.ledger.buffered = fail
        with pytest.raises(RemoteError, match="no such text"):
            small.job.wait_for(1)


def test_an_experience_gives_all_its_groups_in_order(tmp_path):
    with late(tmp_path) as small:
        small.do(small.gates["rollout"].open.set)
        samples = small.job.rollout.generate(small.job.data.tasks(2), 2)
        assert [group.group_id for group in samples.resolve(10.0)] == ["g000002-0", "g000002-1"]
        assert samples.done()


def test_what_is_left_at_the_end_is_dropped_and_never_stored(tmp_path):
    with late(tmp_path, "limiter.straggler=short") as small:
        names(small, 1)
        small.do(small.job.intake.left_over, "left over")
        small.do(small.gates["rollout"].open.set)
        assert balance(small)["dropped"] == {"left over": 2 * ONE} and balance(small)["balanced"]
