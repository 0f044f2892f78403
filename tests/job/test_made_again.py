"""Samples and rewards whose arrays died with their maker are made again, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cosmos_actor.actors.fleet import StateLost
from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.bus.errors import BulkGone, RemoteError
from cosmos_actor.job.intake import MOST_MADE
from cosmos_actor.roles.messages import GenerationRequest, PutRequest, ScoreRequest
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
    assert [event["groups"] for event in told] == [["g000001-0", "g000001-1"]] * 2
    assert "its owner is gone" in told[0]["reason"]


def test_rewards_that_died_with_their_grader_cost_no_second_sample(small):
    deaths = Deaths(small, PutRequest, 1, GONE[1])
    assert stored(small).resolve(10.0) == 2
    assert deaths.asked.count(GenerationRequest) == 1 and deaths.asked.count(ScoreRequest) == 2
    assert small.job.ledger.balance()["buffered"] == 6 and small.buffered_groups == 2


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
