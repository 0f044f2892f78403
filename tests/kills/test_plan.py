"""The plan of the kills and their pace."""

from __future__ import annotations

from cosmos_actor.job.controller import MOST_REWINDS
from cosmos_actor.job.starts import MOST_IN_VAIN
from tests.kills.plan import MOST_S, Pace, plan

ACTORS = ["controller-0", "policy-0", "rollout-0", "rollout-1"]


def test_a_seed_says_whom_and_when_whatever_the_order_of_the_actors():
    assert plan(ACTORS, 50, 3) == plan(ACTORS[::-1], 50, 3) != plan(ACTORS, 50, 4)
    assert plan(ACTORS, 50, 3)[:20] == plan(ACTORS, 20, 3)
    assert all(0 <= kill.after_s <= MOST_S for kill in plan(ACTORS, 200, 0))


def test_every_actor_is_killed_before_one_is_killed_again():
    assert sorted(kill.actor for kill in plan(ACTORS, 4, 0)) == ACTORS
    assert {kill.actor for kill in plan(ACTORS, 40, 0)[4:]} == set(ACTORS)


def test_an_actor_that_never_serves_is_spared_before_the_job_would_give_it_up():
    pace = Pace()
    for _ in range(MOST_IN_VAIN - 1):
        assert not pace.objection("rollout-0")
        pace.killed("rollout-0")
    assert pace.objection("rollout-0") == "rollout-0 to serve" and not pace.objection("rollout-1")
    pace.serves("rollout-0")
    assert not pace.objection("rollout-0")


def test_kills_wait_for_a_step_long_before_the_job_would_give_up():
    pace = Pace()
    pace.reached(7)
    kills = 0
    while not pace.objection(f"rollout-{kills}"):
        pace.killed(f"rollout-{kills}")
        kills += 1
    assert 0 < kills <= MOST_REWINDS / 2
    pace.reached(6)
    assert pace.objection("policy-0") == "a step after step 7", "a step that is done again is none"
    pace.reached(8)
    assert not pace.objection("policy-0")
