"""kill -9 of every role in turn: a restart with a reason, the same steps, a balanced ledger, nothing trained twice."""

from __future__ import annotations

import pytest

from tests.job.runs import START_S, kill
from tests.waiting import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.mark.parametrize("role", ["data", "reward", "reference", "rollout", "replay_buffer", "policy", "controller"])
def test_a_killed_role_comes_back_and_the_job_ends_as_if_nothing_had_happened(run, role, uninterrupted):
    actor = f"{role}-0"
    process = run.start()
    run.until_step(6)
    kill(run.pid(actor))
    [restart] = eventually(lambda: run.events("restarting"), f"the restart of {actor}", within_s=START_S)
    assert restart["actor"] == actor and restart["reason"] == "killed by SIGKILL"
    run.wait(process)
    balance = run.balance()
    assert run.losses() == uninterrupted.losses()
    assert balance["balanced"] and balance["trained"] == 6 * 8 * 4 and balance["in_flight"] == balance["buffered"] == 0
    assert balance["dispatched"] == balance["trained"] + sum(balance["dropped"].values())
    assert [event["actor"] for event in run.events("restarting")] == [actor]


def test_kills_all_over_a_longer_job(run):
    """Every role is killed once while the job goes on."""
    process = run.start(sets=["run.steps=60", "run.checkpoint_every=5"])
    for number, role in enumerate(("rollout", "policy", "reward", "controller", "data", "replay_buffer", "reference")):
        run.until_step(6 + 4 * number)
        kill(run.pid(f"{role}-0"))
    run.wait(process)
    balance = run.balance()
    assert [line["step"] for line in run.metrics() if "loss/total" in line] == list(range(1, 65))
    assert balance["balanced"] and balance["trained"] == 60 * 8 * 4 and balance["in_flight"] == 0
    assert len(run.events("restarting")) == 7
