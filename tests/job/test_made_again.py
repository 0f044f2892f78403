"""Samples and rewards whose arrays died with their maker are made again, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cosmos_actor.actors.fleet import StateLost
from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.bus.errors import BulkGone, RemoteError
from cosmos_actor.job.intake import MOST_MADE, ArraysGone, used
from cosmos_actor.roles.messages import GenerationRequest, PutRequest, ScoreRequest, TasksRequest
from tests.job.small_job import SmallJob, small_job

GONE = (BulkGone("its owner is gone"), RemoteError("BulkGone", "its owner is gone"))


class Deaths:
    """The fleet, but the first `times` questions of a kind find that arrays of theirs are gone."""

    def __init__(self, small: SmallJob, kind: type, times: int, error: BaseException = GONE[0]) -> None:
        self._submit: Callable[..., Any] = small.job.fleet.submit
        self._kind, self._left, self._error = kind, times, error
        self.asked: list[type] = []
        small.job.fleet.submit = self.submit

    async def submit(self, role: str, message: Any, **options: Any) -> Any:
        self.asked.append(type(message))
        if isinstance(message, self._kind) and self._left:
            self._left -= 1
            raise self._error
        return await self._submit(role, message, **options)


@pytest.fixture
def small(tmp_path) -> Iterator[SmallJob]:
    with small_job(tmp_path) as made:
        made.job.restore("the controller started")
        yield made


def stored(small: SmallJob, step: int = 1) -> Any:
    job = small.job
    return job.replay_buffer.put(job.reward.score(job.rollout.generate(job.data.tasks(step), step)), step)


def made_again(small: SmallJob) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(small.job.paths.events) if event["event"] == "made_again"]


@pytest.mark.parametrize("error", GONE, ids=["noticed here", "noticed by the grader"])
def test_samples_that_died_with_their_rollout_are_sampled_again(small, error):
    deaths = Deaths(small, ScoreRequest, 2, error)
    assert stored(small).resolve(10.0) == 2
    assert deaths.asked.count(GenerationRequest) == 3 and deaths.asked.count(ScoreRequest) == 3
    assert small.job.ledger.balance() == {"dispatched": 6, "trained": 0, "dropped": {}, "buffered": 6, "in_flight": 0,
                                          "balanced": True}
    assert small.buffered_groups == 2
    told = made_again(small)
    assert [event["what"] for event in told] == ["2 groups from g000001-0 on"] * 2
    assert "its owner is gone" in told[0]["reason"]


def test_rewards_that_died_with_their_grader_cost_no_second_sample(small):
    deaths = Deaths(small, PutRequest, 1, GONE[1])
    assert stored(small).resolve(10.0) == 2
    assert deaths.asked.count(GenerationRequest) == 1 and deaths.asked.count(ScoreRequest) == 2
    assert small.job.ledger.balance()["buffered"] == 6 and small.buffered_groups == 2


def test_prompts_that_died_with_their_maker_are_asked_for_again(small):
    deaths = Deaths(small, GenerationRequest, 1)
    assert stored(small).resolve(10.0) == 2
    assert deaths.asked.count(TasksRequest) == 2
    assert small.job.ledger.balance()["dispatched"] == small.job.ledger.balance()["buffered"] == 6
    assert [event["what"] for event in made_again(small)] == ["prompts of step 1"]


@pytest.mark.parametrize("again", [True, False])
def test_what_the_policy_is_given_is_made_again_where_its_handle_knows_how(small, again):
    """As for log-probs of the reference, and demonstrations."""
    asked: list[str] = []

    async def ask() -> str:
        asked.append("asked")
        return f"made {len(asked)} times"

    async def use(value: str) -> str:
        if value == "made 1 times":
            raise ArraysGone("their holder is gone")
        return value

    job = small.job
    handle = job.handle(ask(), "reference log-probs", again=ask if again else None)
    use_of_it = job.handle(used(job, handle, use), "update")
    if again:
        assert use_of_it.resolve(5.0) == "made 2 times"
        assert [event["what"] for event in made_again(small)] == ["reference log-probs"]
    else:
        with pytest.raises(ArraysGone):
            use_of_it.resolve(5.0)


def test_samples_of_an_evaluation_are_sampled_again_too(small):
    Deaths(small, ScoreRequest, 1)
    job = small.job
    assert job.reward.accuracy(job.rollout.generate(job.data.tasks(1), 1)).resolve(10.0) == 1.0
    assert job.ledger.balance()["dropped"] == {"evaluation": 6}


def test_what_is_gone_however_often_it_is_made_sends_the_job_back(small):
    Deaths(small, ScoreRequest, 10**6)
    with pytest.raises(StateLost, match="rewards are gone.*its owner is gone"):
        stored(small).resolve(10.0)
    assert len(made_again(small)) == MOST_MADE - 1


def test_groups_that_nobody_here_has_made_send_the_job_back(small):
    job = small.job
    groups = job.rollout.generate(job.data.tasks(1), 1).resolve(10.0)
    Deaths(small, ScoreRequest, 10**6)
    with pytest.raises(StateLost):
        job.replay_buffer.put(job.reward.score(groups), 1).resolve(10.0)
    assert made_again(small) == []
