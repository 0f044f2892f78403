"""Versions on their way from the policy to the rollouts, as the controller sees them.

    publish(step) -> policy packs a manifest -> announced on a state topic -> a rollout pulls, verifies, swaps, reports

Invariant: a report whose digest is not the manifest's ends the job; so does a rollout that says it could not take the
newest version, unless a newer one comes or the policy turns out to be dead. Of a rollout that joined from elsewhere
either ends only its own part in the job. Weights that never arrive are an error with a name, not a wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from cosmos_actor.actors.fleet import Fleet
from cosmos_actor.actors.handle import Handle
from cosmos_actor.actors.messages import Member
from cosmos_actor.bus import BusError, Link
from cosmos_actor.roles.messages import (
    REFERENCE_TOPIC,
    WEIGHTS_TOPIC,
    Published,
    PublishReferenceRequest,
    PublishRequest,
    WeightsReport,
)
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.version import Version

if TYPE_CHECKING:
    from cosmos_actor.job.job import Job

EXCUSE_S = 2.0
"""How long a version that could not be taken may have an excuse: the policy died, or has freed it for a newer one.
Without it the rollout's word comes before the news of the death, and ends a job that only has to go back."""


class WeightsNotTaken(BusError):
    """A rollout could not take the newest version, or holds another digest than was published."""


class Weights:
    """The newest published version and who holds it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._newest: dict[str, Manifest] = {}
        self._held: dict[str, WeightsReport] = {}
        self._problem: WeightsNotTaken | None = None
        self._reported = asyncio.Event()
        self._publishing: Handle[Any] | None = None
        self._epoch = 0
        self.published_step = -1
        job.bus.serve_event(WeightsReport, self._on_report)
        job.fleet.on_joined(self._on_joined)

    def start_epoch(self, epoch: int) -> None:
        """Versions from now on are newer than all before, whatever their step. Nothing is published yet."""
        self._epoch = epoch
        self._newest.clear()
        self._held.clear()
        self._problem = None
        self._publishing = None
        self.published_step = -1

    def publish(self) -> None:
        """Publish the policy as it is after the current step. Returns at once; the next publish waits for this one."""
        step = self._job.step_in_hand
        if self._publishing is not None:
            with self._job.journal.timing("publish_wait"):
                self._publishing.resolve()
        self._publishing = self._job.handle(self._publish(step), f"publication of weights {step}")
        self.published_step = step

    def publish_reference(self) -> None:
        """Freeze the policy as the reference, once a run, and announce it; waits for the policy's answer.

        Nothing is frozen for a run without a KL term: it would cost a copy of the model in memory and on disk.
        """
        job = self._job
        if job.settings.reference_count == 0:
            return
        request = PublishReferenceRequest(self._epoch, job.step_in_hand, str(job.paths.root / "reference"))
        job.call("policy", request, "publication of the reference", self._announce_reference).resolve()

    def wait_until_held(self) -> None:
        """Wait until every present rollout holds the newest version."""
        if self._publishing is not None:
            self._publishing.resolve()
        self._job.handle(self._until_held(), f"weights {self.published_step} at every rollout").resolve()

    @property
    def published(self) -> Version:
        """The newest publication, which may still be under way."""
        return Version(self._job.bus.identity.run_id, self._epoch, self.published_step)

    def check(self) -> None:
        """Raises what went wrong with the newest version."""
        if self._problem is not None:
            raise self._problem

    async def _publish(self, step: int) -> None:
        answer: Published = await self._job.submit("policy", PublishRequest(self._epoch, step), f"weights {step}")
        self._job.journal.spent("publish", answer.seconds)
        self._announce(WEIGHTS_TOPIC, "rollout", answer.manifest)

    def _announce_reference(self, answer: Published) -> None:
        self._announce(REFERENCE_TOPIC, "reference", answer.manifest)

    def _announce(self, topic: str, role: str, manifest: Manifest) -> None:
        self._newest[topic] = manifest
        for link in self._job.fleet.links(role).values():
            link.publish_state(topic=topic, message=manifest)

    def _on_joined(self, member: Member, link: Link) -> None:
        """A late rollout or reference gets the newest version at once; what its name held before is of another life."""
        self._held.pop(member.actor, None)
        topic = {"rollout": WEIGHTS_TOPIC, "reference": REFERENCE_TOPIC}.get(member.role, "")
        if topic in self._newest:
            link.publish_state(topic=topic, message=self._newest[topic])

    async def _on_report(self, report: WeightsReport, link: Link) -> None:
        newest = self._newest.get(WEIGHTS_TOPIC)
        if newest is None or (report.epoch, report.step) != (newest.version.epoch, newest.version.step):
            return  # of an older version: a rollout may skip versions
        if report.problem:
            asyncio.get_running_loop().call_later(EXCUSE_S, self._blame, newest, link, report.problem)
        elif report.digest != newest.digest:
            self._blame(newest, link, f"holds digest {report.digest[:12]}, published was {newest.digest[:12]}")
        self._held[report.actor] = report
        self._reported.set()

    def _blame(self, manifest: Manifest, link: Link, what: str) -> None:
        """Who is at `link` did not take `manifest`, which still is the newest; one that replaces it may be under way.

        A life that is over by now is not blamed, and whoever joined only loses its place.
        """
        if self._newest.get(WEIGHTS_TOPIC) is not manifest:
            return
        if self._publishing is not None and not self._publishing.done():
            asyncio.get_running_loop().call_later(EXCUSE_S, self._blame, manifest, link, what)
            return
        what = f"{link.peer.actor} could not take weights {manifest.version.step}: {what}"
        if not self._job.fleet.dismiss(link, what):
            self._problem = WeightsNotTaken(what, setting="weights.deadline_s")
        self._reported.set()

    async def _until_held(self) -> None:
        fleet: Fleet = self._job.fleet
        while not all(self._holds_newest(actor) for actor in fleet.links("rollout")):
            self._reported.clear()
            self.check()
            try:
                await asyncio.wait_for(self._reported.wait(), 0.5)
            except asyncio.TimeoutError:
                continue  # members may have left meanwhile: look again until the handle's own deadline

    def _holds_newest(self, actor: str) -> bool:
        newest, report = self._newest.get(WEIGHTS_TOPIC), self._held.get(actor)
        return newest is not None and report is not None and report.digest == newest.digest
