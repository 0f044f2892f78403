"""Rollouts take a version once, however often it is announced; a grader that is late is an error, never a score."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_actor.actors.context import Context, SystemClock
from cosmos_actor.actors.worker import ThreadWorker
from cosmos_actor.bus import Identity
from cosmos_actor.bus.errors import BusError, DeadlineExceeded
from cosmos_actor.roles.messages import ScoreRequest
from cosmos_actor.roles.reward import NoReward, RewardRole
from cosmos_actor.roles.rollout import RolloutRole
from cosmos_actor.weight_plane.errors import WeightsLate
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.swap import WeightsHeld
from cosmos_actor.weight_plane.version import Version
from tests.actors.groups import make_group


class Source:
    """Weights that can be pulled; counts how often they were."""

    def __init__(self) -> None:
        self.pulled = 0

    async def pull(self, manifest: Any, deadline_s: float) -> dict[str, Any]:
        self.pulled += 1
        return {}


class Engine:
    """Always has something in flight, and brings it on."""

    in_flight = True

    def step(self) -> None:
        pass

    def load_weights(self, tensors: Any, version: int, digest: str) -> str:
        return digest

    def statistics(self) -> dict[str, float]:
        return {"swaps": 1.0, "fp8/q_proj/rms": 0.02}


def context(worker: ThreadWorker, **more: Any) -> Context:
    settings = SimpleNamespace(weights=SimpleNamespace(deadline_s=5.0), reward=SimpleNamespace(deadline_s=0.05),
                               run=SimpleNamespace(grouping="per_role"),
                               rollout=SimpleNamespace(on_new_weights="recompute", probe_s=60.0))
    return Context(Identity("run", "any", "any-0", "1"), settings, seed=0, clock=SystemClock(), worker=worker, **more)


@pytest.fixture
def worker():
    made = ThreadWorker("test")
    yield made
    made.close()


def test_a_version_that_is_announced_again_is_reported_again_and_not_pulled(worker):
    reports = []

    async def emit(report: Any) -> None:
        reports.append((report.step, report.digest, report.problem, report.rounding))

    async def run() -> None:
        source = Source()
        role = RolloutRole(context(worker, weights=source, emit=emit))
        role.hold_nothing()
        role.engine = Engine()
        for _ in range(2):
            await role.on_weights(Manifest(Version("run", 0, 3), "abc", [], []))
        assert source.pulled == 1

    asyncio.run(run())
    assert reports == [(3, "abc", "", {"q_proj/rms": 0.02})] * 2


@pytest.mark.parametrize(("announced", "held", "kind"), [
    (None, None, DeadlineExceeded), (2, 2, DeadlineExceeded), (2, 1, WeightsLate), (3, 2, WeightsLate),
    (3, None, WeightsLate),
])
def test_a_rollout_without_the_weights_it_was_told_of_says_that_it_is_the_one_that_is_late(
        worker, announced, held, kind):
    async def run() -> None:
        role = RolloutRole(context(worker))
        role.taken, role.announced = asyncio.Event(), announced and Version("run", 0, announced)
        role.held = held and WeightsHeld(Version("run", 0, held), "")
        await role.wait_for_version(3, Version("run", 0, 3).ordinal, 0.05)

    with pytest.raises(BusError, match=r"waited 0\.05 s for newer weights, holds") as raised:
        asyncio.run(run())
    assert type(raised.value) is kind


@pytest.fixture
def slow_task():
    end = threading.Event()
    yield SimpleNamespace(reward=lambda payload, text: float(end.wait(10.0)))
    end.set()


def test_a_grader_that_is_late_is_an_error_that_names_the_setting(worker, slow_task):
    role = RewardRole(context(worker))
    role.task = slow_task
    with pytest.raises(DeadlineExceeded, match=r"has not graded 1 groups after 0\.05 s.*reward\.deadline_s"):
        asyncio.run(role.score(ScoreRequest([make_group()])))


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), None, "yes"])
def test_what_is_no_reward_is_an_error_and_never_trained_on(worker, answer):
    about = context(worker)
    about.settings.reward.deadline_s, about.settings.data = 10.0, SimpleNamespace(task="mine:make")
    role = RewardRole(about)
    role.task = SimpleNamespace(reward=lambda payload, text: answer)
    with pytest.raises(NoReward, match=r"mine:make gave .* for .*, not a finite number"):
        asyncio.run(role.score(ScoreRequest([make_group()])))
