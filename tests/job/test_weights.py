"""A version that a rollout did not take ends the job, unless a newer one or a rewind explains it, or it has joined."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_actor.job import weights as module
from cosmos_actor.job.weights import UnprovenWeights, Weights, WeightsNotTaken
from cosmos_actor.roles.messages import (
    REFERENCE_TOPIC,
    WEIGHTS_TOPIC,
    Mended,
    MendRequest,
    NotPublished,
    Published,
    WeightsAlarm,
    WeightsReport,
)
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
    made = Weights(SimpleNamespace(bus=bus, fleet=Links(), settings=settings, tell=lambda event, **facts: None))
    made.start_epoch(0)
    return made


def manifest(step: int, epoch: int = 0) -> Manifest:
    return Manifest(Version("run", epoch, step), f"digest {step}", [], [])


def report(weights: Weights, step: int, *reports: tuple[str, str], then: Any = lambda: None) -> None:
    """Version `step` is announced, rollout-0 says each (digest, problem), `then` happens, and a moment goes by."""

    async def run() -> None:
        weights.published_step = max(weights.published_step, step)
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


def test_a_version_with_the_bytes_of_the_one_before_is_held_when_it_was_taken_and_not_before(weights):
    report(weights, 1, ("digest 1", ""))
    weights.published_step = 2
    same = Manifest(Version("run", 0, 2), "digest 1", [], [])
    weights._newest[WEIGHTS_TOPIC] = same
    assert not weights._holds_newest("rollout-0")
    asyncio.run(weights._on_report(WeightsReport("rollout-0", 0, 2, "digest 1", ""), weights._job.fleet))
    assert weights._holds_newest("rollout-0")


@pytest.mark.parametrize("excuse", [None, lambda weights: weights.start_epoch(1)], ids=["it stays so", "a rewind"])
def test_a_frozen_reference_that_could_not_be_taken_ends_the_job_unless_it_goes_back(weights, excuse):
    async def run() -> None:
        weights._announce(REFERENCE_TOPIC, "reference", manifest(1))
        said = WeightsReport("reference-0", 0, 1, "", "WeightsCorrupt: tensor a", REFERENCE_TOPIC)
        await weights._on_report(said, SimpleNamespace(peer=SimpleNamespace(actor="reference-0")))
        if excuse:
            excuse(weights)
        await asyncio.sleep(0.01)

    weights.published_step = 5  # versions of the policy go on meanwhile
    weights._job.fleet.dismiss = lambda link, reason: False
    asyncio.run(run())
    if excuse:
        return weights.check()
    with pytest.raises(WeightsNotTaken, match="reference-0 could not take the frozen reference: WeightsCorrupt"):
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
    weights.published_step = 2
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


class Group:
    """What `vouch` looks at."""

    def __init__(self, oldest: int, newest: int) -> None:
        self.version_min, self.version_max = oldest, newest


def publish(weights: Weights, *steps: int) -> None:
    """The policy says that it has published these."""
    weights._job.journal = SimpleNamespace(spent=lambda *arguments: None)

    async def run() -> None:
        for step in steps:
            await weights._on_published(Published(manifest(step), 0.1), weights._job.fleet)

    asyncio.run(run())


def generation(groups: list[Group], **digests: str) -> Any:
    return SimpleNamespace(groups=groups, weights={name.replace("_", ".")[1:]: what for name, what in digests.items()})


def test_groups_are_trained_when_every_version_that_made_them_is_vouched_for(weights):
    publish(weights, 1, 2, 3)
    weights.vouch(generation([Group(1, 1)], v0_1="digest 1"))
    weights.vouch(generation([Group(1, 3), Group(2, 2)], v0_1="digest 1", v0_2="digest 2", v0_3="digest 3"))


@pytest.mark.parametrize(("made", "why"), [
    (generation([Group(1, 1)], v0_1="other"), "made with weights 0.1 of digest other, published was digest 1"),
    (generation([Group(1, 1)], v0_1=""), "made with weights 0.1 of digest unknown, published was digest 1"),
    (generation([Group(1, 2)], v0_1="digest 1"), "made with weights 0.2, and nobody says of which digest"),
    (generation([Group(1, 1)]), "made with weights 0.1, and nobody says of which digest"),
    (generation([Group(7, 7)], v0_7="digest 7"), "made with weights 0.7 of digest digest 7, published was unknown"),
    (generation([Group(1, 2)], v0_1="digest 1", v0_2="digest 1"), "published was digest 2"),
])
def test_groups_of_weights_that_nobody_proved_are_refused(weights, made, why):
    publish(weights, 1, 2)
    with pytest.raises(UnprovenWeights, match=why):
        weights.vouch(made)


def test_digests_of_an_earlier_life_vouch_for_nothing(weights):
    publish(weights, 1)
    weights.start_epoch(1)
    with pytest.raises(UnprovenWeights):
        weights.vouch(generation([Group(1, 1)], v0_1="digest 1"))


def test_what_the_policy_could_not_publish_ends_the_job_and_names_the_setting(weights):
    problem = "BulkFull: version 0.1 does not fit: raise bulk.budget_bytes"
    asyncio.run(weights._on_not_published(NotPublished(0, 1, problem), SimpleNamespace(peer=SimpleNamespace(
        actor="policy-0"))))
    with pytest.raises(WeightsNotTaken, match=f"policy-0 could not publish weights 1: {problem}"):
        weights.check()
    weights.start_epoch(1)
    asyncio.run(weights._on_not_published(NotPublished(0, 1, problem), None))
    weights.check()


def test_an_alarm_is_told_and_counted_and_the_policy_is_asked_to_look_once(weights):
    told, asked = [], []
    alarm = WeightsAlarm("rollout-0", 0, 1, "norm", "tensor norm: its bytes are not those of the manifest", 3)

    async def submit(role: str, request: Any, what: str) -> Mended:
        asked.append((role, request))
        await asyncio.sleep(0)
        return Mended(["norm"])

    async def run() -> None:
        weights._job.tell = lambda event, **facts: told.append((event, facts))
        weights._job.spawn = asyncio.get_running_loop().create_task
        weights._job.submit = submit
        for late in (alarm, alarm, WeightsAlarm("rollout-0", 7, 1, "norm", "of another life", 3)):
            await weights._on_alarm(late, weights._job.fleet)
        for _ in range(5):
            await asyncio.sleep(0)
        await weights._on_alarm(alarm, weights._job.fleet)
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert weights.counts()["weights/alarms"] == 3
    assert asked == [("policy", MendRequest(0, 1))] * 2
    assert [event for event, _ in told] == ["weights_alarm", "weights_alarm", "weights_mended"] + [
        "weights_alarm", "weights_mended"]
    assert told[0][1]["tensor"] == "norm" and told[2][1] == {
        "step": 1, "tensors": ["norm"], "count": 1, "frozen": False}


def test_one_that_is_awake_again_is_told_again_and_what_it_held_before_does_not_count(weights):
    report(weights, 1, ("digest 1", ""))
    link = weights._job.fleet
    link.lost = None
    weights.announce_again(link)
    assert link.published[-1] == manifest(1) and not weights._holds_newest("rollout-0")

    async def run() -> None:
        waiting = asyncio.ensure_future(weights.until_held_at(link))
        await asyncio.sleep(0)
        assert not waiting.done()
        await weights._on_report(WeightsReport("rollout-0", 0, 1, "digest 1", ""), link)
        await asyncio.wait_for(waiting, 5.0)
        weights.announce_again(link)
        link.lost = "killed"
        await asyncio.wait_for(weights.until_held_at(link), 5.0)

    asyncio.run(run())


def test_before_anything_is_published_nobody_is_waited_for(weights):
    weights._job.fleet.lost = None
    asyncio.run(weights.until_held_at(weights._job.fleet))
