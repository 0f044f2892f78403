"""A version that a rollout did not take ends the job, unless a newer one or a rewind explains it, or it has joined."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_actor.job import weights as module
from cosmos_actor.job.weights import Weights, WeightsNotTaken
from cosmos_actor.roles.messages import WEIGHTS_TOPIC, WeightsReport
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.version import Version


class Links:
    """A fleet of one rollout that keeps what was published to it, and the link to it."""

    peer = SimpleNamespace(actor="rollout-0")

    def __init__(self) -> None:
        self.may_be_dismissed = False
        self.dismissed: list[str] = []
        self.published: list[Any] = []
        self.joined: Any = None

    def on_joined(self, callback: Any) -> None:
        self.joined = callback

    def links(self, role: str) -> dict[str, Any]:
        return {"rollout-0": self}

    def publish_state(self, *, topic: str, message: Any) -> None:
        self.published.append(message)

    def dismiss(self, link: Any, reason: str) -> bool:
        assert link is self
        self.dismissed += [reason] * self.may_be_dismissed
        return self.may_be_dismissed


@pytest.fixture
def weights(monkeypatch):
    monkeypatch.setattr(module, "EXCUSE_S", 0.0)
    settings = SimpleNamespace(reference_count=0)
    bus = SimpleNamespace(serve_event=lambda *arguments: None, identity=SimpleNamespace(run_id="run"))
    made = Weights(SimpleNamespace(bus=bus, fleet=Links(), settings=settings))
    made.start_epoch(0)
    return made


def manifest(step: int, epoch: int = 0) -> Manifest:
    return Manifest(Version("run", epoch, step), f"digest {step}", [], [])


def report(weights: Weights, step: int, *reports: tuple[str, str], then: Any = lambda: None) -> None:
    """Version `step` is announced, rollout-0 says each (digest, problem), `then` happens, and a moment goes by."""

    async def run() -> None:
        weights._announce(WEIGHTS_TOPIC, "rollout", manifest(step))
        for digest, problem in reports:
            await weights._on_report(WeightsReport("rollout-0", 0, step, digest, problem), weights._job.fleet)
        then()
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(run())


def test_a_rollout_that_took_it_is_no_problem(weights):
    report(weights, 1, ("digest 1", ""))
    weights.check()


def test_another_digest_ends_the_job_at_once_also_when_a_newer_version_follows(weights):
    report(weights, 1, ("digest 9", ""),
           then=lambda: weights._announce(WEIGHTS_TOPIC, "rollout", manifest(2)))
    with pytest.raises(WeightsNotTaken, match="rollout-0 could not take weights 1: holds digest digest 9"):
        weights.check()


def test_a_newest_version_that_could_not_be_taken_ends_the_job(weights):
    report(weights, 1, ("", "WeightsCorrupt: tensor a"))
    with pytest.raises(WeightsNotTaken, match="rollout-0 could not take weights 1: WeightsCorrupt: tensor a"):
        weights.check()


@pytest.mark.parametrize(("said", "why"), [
    (("", "WeightsCorrupt: tensor a"), "WeightsCorrupt: tensor a"),
    (("digest 9", ""), "holds digest digest 9, published was digest 1"),
])
def test_one_that_joined_only_loses_its_place(weights, said, why):
    weights._job.fleet.may_be_dismissed = True
    report(weights, 1, said)
    weights.check()
    assert weights._job.fleet.dismissed == [f"rollout-0 could not take weights 1: {why}"]


@pytest.mark.parametrize("excuse", [
    lambda weights: weights._announce(WEIGHTS_TOPIC, "rollout", manifest(2)), lambda weights: weights.start_epoch(1),
], ids=["a newer version", "a rewind"])
def test_a_version_that_was_freed_under_its_reader_is_excused(weights, excuse):
    report(weights, 1, ("", "BulkGone: freed"), then=lambda: excuse(weights))
    weights.check()


def test_while_the_next_version_is_under_way_nobody_is_blamed(weights):
    weights._publishing = SimpleNamespace(done=lambda: False)
    report(weights, 1, ("", "BulkGone: freed"))
    weights.check()


def test_what_an_earlier_life_of_a_rollout_held_does_not_count(weights):
    report(weights, 1, ("digest 1", ""))
    assert weights._holds_newest("rollout-0")
    weights._on_joined(SimpleNamespace(role="rollout", actor="rollout-0"), weights._job.fleet)
    assert not weights._holds_newest("rollout-0")
    assert weights._job.fleet.published[-1] == manifest(1)


def test_without_a_kl_term_no_reference_is_frozen(weights):
    weights.publish_reference()  # the job of this test could not be asked


def test_versions_of_a_later_life_are_newer(weights):
    weights.published_step = 12
    before = weights.published
    weights.start_epoch(1)
    weights.published_step = 10
    assert weights.published.ordinal > before.ordinal
