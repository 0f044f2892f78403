"""What a job asked for before it went back to a checkpoint has no effect after that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cosmos_actor.actors.fleet import StateLost
from cosmos_actor.bus.errors import BulkGone, RemoteError
from tests.job.small_job import SmallJob, small_job
from tests.waiting import eventually

NOTHING = {"trained": 0, "buffered": 0, "in_flight": 0, "balanced": True}


@pytest.fixture
def small(tmp_path) -> Iterator[SmallJob]:
    with small_job(tmp_path) as made:
        made.job.restore("the controller started")
        yield made


def experience(small: SmallJob, step: int = 1) -> Any:
    """The handle of a step's samples, stored."""
    job = small.job
    return job.replay_buffer.put(job.reward.score(job.rollout.generate(job.data.tasks(step), step)), step)


def balance(small: SmallJob) -> dict[str, Any]:
    found = small.job.ledger.balance()
    return {name: found[name] for name in NOTHING}


@pytest.mark.parametrize("role", ["data", "rollout", "reward"])
def test_an_answer_that_comes_after_a_rewind_reaches_neither_ledger_nor_replay_buffer(small, role):
    gate = small.gates[role]
    small.do(gate.open.clear)
    experience(small)
    eventually(lambda: gate.came == 1, f"a question to {role}")
    small.job.restore("policy-0 is gone")
    small.do(gate.open.set)
    assert experience(small, step=2).resolve(10.0) == 2  # whatever was still on its way came before this
    assert balance(small) == {**NOTHING, "buffered": 6}
    assert small.buffered_groups == 2


def test_the_same_step_can_be_asked_for_again_after_a_rewind(small):
    small.do(small.gates["rollout"].open.clear)
    experience(small)
    eventually(lambda: small.gates["rollout"].came == 1, "a question to the rollout")
    small.job.restore("policy-0 is gone")
    again = experience(small)
    small.do(small.gates["rollout"].open.set)
    assert again.resolve(10.0) == 2
    found = small.job.ledger.balance()
    assert (found["buffered"], found["dropped"]) == (6, {"rolled back to step 0: policy-0 is gone": 6})


def test_a_death_is_known_until_the_rewind_and_forgotten_after_it(small):
    small.do(small.cluster.crash, "replay_buffer-0")
    eventually(lambda: small.job.fleet.lost, "the news of the death")
    with pytest.raises(StateLost, match="killed by SIGKILL"):
        experience(small).resolve(10.0)
    small.do(small.cluster.add, "replay_buffer-0", type(small.cluster.actors["replay_buffer-0"].role))
    small.job.restore("replay_buffer-0 is gone")
    assert experience(small).resolve(10.0) == 2


@pytest.mark.parametrize("error", [BulkGone("its owner is gone"), RemoteError("BulkGone", "its owner is gone")])
def test_arrays_that_died_with_their_holder_make_the_job_go_back(small, monkeypatch, error):
    async def gone(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(small.job.fleet, "submit", gone)
    with pytest.raises(StateLost, match="rewards are gone.*its owner is gone"):
        small.job.call("reward", object(), "rewards").resolve(5.0)


def test_samples_count_from_the_version_when_they_were_asked_for(small):
    job, gate = small.job, small.gates["data"]
    job.weights.published_step = 3
    small.do(gate.open.clear)
    samples = job.rollout.generate(job.data.tasks(5), 5)
    eventually(lambda: gate.came == 1, "a question to data")
    job.weights.published_step = 4
    small.do(gate.open.set)
    samples.resolve(10.0)
    assert job.ledger.history("g000005-0/0")[0]["version_dispatch"] == 3
