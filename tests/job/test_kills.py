"""kill -9 of every role in turn: a restart with a reason, the same steps, a balanced ledger, nothing trained twice."""

from __future__ import annotations

import pytest

from tests.job.runs import START_S, Run, kill
from tests.kills.figures import broken
from tests.kills.session import kill_all_over
from tests.waiting import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
ROLES = ("data", "reward", "reference", "rollout", "replay_buffer", "policy", "controller")


@pytest.mark.parametrize("role", ROLES)
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


@pytest.mark.timeout(1500)
def test_kills_all_over_a_longer_job(run, tmp_path, popen):
    """As `python -m tests.kills --kills 12`: each actor once, then any, at random moments."""
    found = kill_all_over(run, Run(tmp_path, popen, "undisturbed"), kills=12, seed=0)
    assert broken(found, found_s=2.0) == [], found
    killed = {actor.rpartition("-")[0] for actor, counts in found["actors"].items() if counts["killed"]}
    assert killed == {*ROLES, "registry"}
