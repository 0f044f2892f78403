"""The bus on seeded bad networks. The whole hundred thousand: `python -m tests.simulation --schedules 100000`."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cosmos_actor.bus.bulk.loans import LoanTable
from cosmos_actor.bus.credit import Credit
from cosmos_actor.bus.delivery import NEW, Inbox
from cosmos_actor.bus.incoming import Incoming
from cosmos_actor.bus.roster import Roster
from tests.simulation.__main__ import try_seeds
from tests.simulation.schedule import simulate

SEEDS, MANY_SEEDS = 150, 2500
CAUGHT_WITHIN = 300


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Schedules run without garbage collection; what they leave is not the next test's to find mapped."""
    yield
    gc.collect()


def test_every_promise_holds_on_every_schedule() -> None:
    assert try_seeds(range(SEEDS)) == []


@pytest.mark.parametrize("seed", [620, 751])
def test_schedules_that_once_broke_a_promise_hold(seed: int) -> None:
    """An answer that was packed after its asker had died stayed lent for ever."""
    simulate(seed)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_every_promise_holds_on_many_schedules() -> None:
    assert try_seeds(range(SEEDS, MANY_SEEDS)) == []


def test_schedules_are_not_all_quiet() -> None:
    """What the faults did, summed over the seeds above: nothing of it is zero."""
    total: dict[str, int] = {}
    for seed in range(60):
        for transport in simulate(seed).transports:
            for name, count in transport.count.items():
                total[name] = total.get(name, 0) + count
    assert min(total[name] for name in ("dropped", "duplicated", "reordered", "corrupted")) > 20, total


REPLAY = """
from tests.simulation.schedule import simulate
world = simulate({})
print(world.answered, world.lost, *([(life, numbers) for (life, _), numbers in kept.items()]
                                   for kept in (world.events, world.order)))
print([transport.count for transport in world.transports])
"""


@pytest.mark.parametrize("seed", [3, 17, 42])
def test_a_seed_replays_in_another_process(seed: int) -> None:
    """The same order of everything, whatever the addresses and hashes of that process."""
    told = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", REPLAY.format(seed)]
        told.add(subprocess.run(command, env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
                                capture_output=True, text=True, check=True, timeout=60).stdout)
    assert len(told) == 1


# -- planted bugs: each is of a kind that has hurt users of other systems -------------------------------------------


def acknowledge_before_processing(patch: pytest.MonkeyPatch) -> None:
    begin = Incoming._dispatch

    def early(self: Incoming, lane_name: str, job: Any) -> None:
        if job.channel == 0:
            self._out.acknowledge(job.channel, job.number)
        begin(self, lane_name, job)

    patch.setattr(Incoming, "_dispatch", early)


def no_dedup(patch: pytest.MonkeyPatch) -> None:
    accept = Inbox.accept

    def careless(self: Inbox, number: int) -> str:
        if number < self.expected and number not in self._running:
            self._running[number] = None
            return NEW
        return accept(self, number)

    patch.setattr(Inbox, "accept", careless)


def stale_incarnation_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "objection", lambda self, theirs, known: None)


def credit_leak(patch: pytest.MonkeyPatch) -> None:
    give_back, chance = Credit.give_back, random.Random(0)

    def leaky(self: Credit, nbytes: int) -> None:
        if chance.random() > 0.01:
            give_back(self, nbytes)

    patch.setattr(Credit, "give_back", leaky)


def lease_leak(patch: pytest.MonkeyPatch) -> None:
    use_ended, chance = LoanTable.use_ended, random.Random(0)

    def forgetful(self: LoanTable, key: Any) -> Any:
        return use_ended(self, key) if chance.random() > 0.02 else []

    patch.setattr(LoanTable, "use_ended", forgetful)


def gaps_are_passed_over(patch: pytest.MonkeyPatch) -> None:
    accept = Inbox.accept

    def impatient(self: Inbox, number: int) -> str:
        self.expected = max(self.expected, number)
        return accept(self, number)

    patch.setattr(Inbox, "accept", impatient)


@pytest.mark.parametrize("plant", [
    acknowledge_before_processing, no_dedup, stale_incarnation_accepted, credit_leak, lease_leak, gaps_are_passed_over])
def test_a_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(try_seeds(range(seed, seed + 1)) for seed in range(CAUGHT_WITHIN))
