"""Actors join and leave in every way there is while a run goes on, and the run is the one that it would have been."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.churn.__main__ import churn
from tests.churn.plan import LEAVES, MOST, ROLES, Join, Leave, Plan


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_who_comes_and_goes_changes_nothing_but_the_pace(tmp_path, record_property):
    figures = churn(tmp_path, 25.0, 3, least=3)
    for name in ("joined", "of_use", "leaves", "longest_gap_s", "redelivered", "steps_per_s", "calm_steps_per_s"):
        record_property(name, figures[name])
    assert figures["faults"] == []
    assert figures["of_use"] >= 4 and figures["losses"]["compared"] >= 6, figures


def test_the_plan_is_of_every_kind_and_gives_no_name_of_the_living_away():
    plan, living, lives, leaves = Plan(0), {}, Counter(), Counter()
    for _ in range(2000):
        for deed in plan.moment(living, living):
            if isinstance(deed, Join):
                assert deed.name not in living
                living[deed.name] = deed.role
                lives[deed.name] += 1
            else:
                leaves[deed.how] += 1
                if deed.how != "freeze":
                    del living[deed.name]
        assert all(list(living.values()).count(role) <= MOST[role] for role in ROLES)
    assert set(leaves) == set(LEAVES) and max(lives.values()) > 1


def test_a_seed_gives_its_plan_again():
    def deeds(seed: int) -> list[list[Join | Leave]]:
        plan = Plan(seed)
        return [plan.moment({"reward-9": "reward"}, {"reward-9": "reward"}) for _ in range(50)]

    assert deeds(1) == deeds(1) != deeds(2)
