"""Versions on their way from the policy to the rollouts, as the controller sees them.

    publish(step) -> snapshot ──> the policy trains on
                         `> published -> announced on a state topic -> a rollout pulls, verifies, swaps, reports

A snapshot that a newer one overtakes is never published: whoever waits for it gets the newer one.

A version that comes damaged is an alarm: the rollout keeps the one before, the policy compares what lies on the bulk
plane with its snapshot and puts it right, and the rollout fetches it again. Groups are trained only when whoever made
them vouches, version by version, for the digests that were published.

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
from cosmos_actor.job.turns import ROLLOUT
from cosmos_actor.roles.messages import (
    REFERENCE_TOPIC,
    WEIGHTS_TOPIC,
    Generation,
    Mended,
    MendRequest,
    NotPublished,
    Published,
    PublishReferenceRequest,
    PublishRequest,
    Snapshotted,
    WeightsAlarm,
    WeightsReport,
)
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.shown_digest import shown
from cosmos_actor.weight_plane.version import Version

if TYPE_CHECKING:
    from cosmos_actor.job.job import Job

REMEMBERED = 1000
"""Published digests that groups are compared with: far more than `run.max_staleness` lets any of them be old."""
SHOWN = 10
"""Tensors that an event names."""
EXCUSE_S = 2.0
"""How long a version that could not be taken may have an excuse: the policy died, or has freed it for a newer one.
Without it the rollout's word comes before the news of the death, and ends a job that only has to go back."""


class WeightsNotTaken(BusError):
    """A rollout could not take the newest version, or holds another digest than was published; or the policy could not
    publish one."""


class UnprovenWeights(BusError):
    """Groups that were made with weights whose digest is unknown, or not the one that was published."""


class Weights:
    """The newest published version and who holds it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._newest: dict[str, Manifest] = {}
        self._held: dict[str, WeightsReport] = {}
        self._problem: WeightsNotTaken | None = None
        self._reported = asyncio.Event()
        self._snapshot: Handle[Any] | None = None
        self._replaced = 0
        self._alarms = 0
        self._mending = False
        self._digests: dict[str, str] = {}
        """Version -> digest of what was published in this life, the newest `REMEMBERED` of it."""
        self._epoch = 0
        self.published_step = -1
        job.bus.serve_event(WeightsReport, self._on_report)
        job.bus.serve_event(Published, self._on_published)
        job.bus.serve_event(NotPublished, self._on_not_published)
        job.bus.serve_event(WeightsAlarm, self._on_alarm)
        job.fleet.on_joined(self._on_joined)

    def start_epoch(self, epoch: int) -> None:
        """Versions from now on are newer than all before, whatever their step. Nothing is published yet."""
        self._epoch = epoch
        self._newest.clear()
        self._held.clear()
        self._digests.clear()
        self._problem = None
        self._snapshot = None
        self.published_step = -1

    def publish(self) -> None:
        """Publish the policy as it is after the current step. Returns at once; the next waits for this one's snapshot,
        not for its publication."""
        step = self._job.step_in_hand
        if self._snapshot is not None:
            self._snapshot.resolve()
        self._snapshot = self._job.handle(self._snapshotted(step), f"snapshot of weights {step}")
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
        if self._snapshot is not None:
            self._snapshot.resolve()
        self._job.handle(self._until_all_hold(), f"weights {self.published_step} at every rollout").resolve()

    def announce_again(self, member_link: Link) -> None:
        """To a rollout that is awake again: what it was told meanwhile it has not taken, what it held may be void."""
        self._held.pop(member_link.peer.actor, None)
        if WEIGHTS_TOPIC in self._newest:
            member_link.publish_state(topic=WEIGHTS_TOPIC, message=self._newest[WEIGHTS_TOPIC])

    async def until_held_at(self, member_link: Link) -> None:
        """Until the rollout there holds the newest version, or its link is lost. At once where none is published."""
        while self.published_step >= 0 and member_link.lost is None:
            if self._holds_newest(member_link.peer.actor):
                return
            await self._next_report()

    @property
    def published(self) -> Version:
        """The newest publication, which may still be under way."""
        return Version(self._job.bus.identity.run_id, self._epoch, self.published_step)

    def check(self) -> None:
        """Raises what went wrong with the newest version."""
        if self._problem is not None:
            raise self._problem

    def counts(self) -> dict[str, int]:
        """For the metrics of a step; all are counted since the policy started."""
        newest = self._newest.get(WEIGHTS_TOPIC)
        sizes = {} if newest is None else {"weights/bytes": newest.nbytes, "weights/delta_bytes": newest.delta_bytes}
        return {"weights/replaced": self._replaced, "weights/alarms": self._alarms, **sizes}

    def vouch(self, made: Generation) -> None:
        """Raises UnprovenWeights unless `made` names the published digest of every version that made it."""
        for version, digest in made.weights.items():
            published = self._digests.get(version, "")
            if not published or digest != published:
                raise UnprovenWeights(f"made with weights {version} of digest {shown(digest)}, published was "
                                      f"{shown(published)}")
        steps = {step for group in made.groups for step in (group.version_min, group.version_max) if step is not None}
        unnamed = sorted(step for step in steps if f"{self._epoch}.{step}" not in made.weights)
        if unnamed:
            raise UnprovenWeights(f"made with weights {self._epoch}.{unnamed[0]}, and nobody says of which digest")

    async def _snapshotted(self, step: int) -> None:
        answer: Snapshotted = await self._job.submit("policy", PublishRequest(self._epoch, step), f"weights {step}")
        self._replaced = answer.replaced

    async def _on_published(self, answer: Published, link: Link) -> None:
        if answer.manifest.version.epoch == self._epoch:  # else it was on its way when the job went back
            self._job.journal.spent("publish", answer.seconds)
            self._digests[str(answer.manifest.version)] = answer.manifest.digest
            for old in list(self._digests)[:-REMEMBERED]:
                del self._digests[old]
            self._announce(WEIGHTS_TOPIC, "rollout", answer.manifest)
            self._reported.set()

    async def _on_not_published(self, word: NotPublished, link: Link) -> None:
        if word.epoch == self._epoch:
            what = f"{link.peer.actor} could not publish weights {word.step}: {word.problem}"
            self._problem = self._problem or WeightsNotTaken(what)
            self._reported.set()

    async def _on_alarm(self, alarm: WeightsAlarm, link: Link) -> None:
        """Told once each time; the policy is asked to look at its side unless it does already."""
        if alarm.epoch != self._epoch:
            return
        self._alarms += 1
        self._job.tell("weights_alarm", rollout=alarm.actor, step=alarm.step, tensor=alarm.tensor, text=alarm.problem,
                       left=alarm.left, frozen=alarm.topic == REFERENCE_TOPIC)
        if not self._mending:
            self._mending = True
            self._job.spawn(self._mend(alarm)).add_done_callback(self._mended)

    async def _mend(self, alarm: WeightsAlarm) -> None:
        request = MendRequest(alarm.epoch, alarm.step, alarm.topic)
        answer: Mended = await self._job.submit("policy", request, f"a look at weights {alarm.step} after an alarm")
        if answer.tensors:
            self._job.tell("weights_mended", step=alarm.step, tensors=answer.tensors[:SHOWN], count=len(answer.tensors),
                           frozen=alarm.topic == REFERENCE_TOPIC)

    def _mended(self, task: asyncio.Task[None]) -> None:
        self._mending = False

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
        newest = self._newest.get(report.topic)
        if report.topic == REFERENCE_TOPIC:
            if newest is not None and (report.epoch, report.step) == (newest.version.epoch, newest.version.step):
                self._blame_later(report.topic, newest, link, report.problem)
            return
        self._job.tell("weights_taken", rollout=report.actor, epoch=report.epoch, step=report.step,
                       digest=report.digest, published=self._digests.get(f"{report.epoch}.{report.step}", ""),
                       problem=report.problem, **({"rounding": report.rounding} if report.rounding else {}))
        if newest is None or (report.epoch, report.step) != (newest.version.epoch, newest.version.step):
            return  # of an older version: a rollout may skip versions
        if report.problem:
            self._blame_later(WEIGHTS_TOPIC, newest, link, report.problem)
        elif report.digest != newest.digest:
            self._blame(WEIGHTS_TOPIC, newest, link,
                        f"holds digest {shown(report.digest)}, published was {shown(newest.digest)}")
        self._held[report.actor] = report
        self._reported.set()

    def _blame_later(self, topic: str, manifest: Manifest, link: Link, what: str) -> None:
        asyncio.get_running_loop().call_later(EXCUSE_S, self._blame, topic, manifest, link, what)

    def _blame(self, topic: str, manifest: Manifest, link: Link, what: str) -> None:
        """Who is at `link` did not take `manifest`, which still is the newest; one that replaces it may be under way.

        A life that is over by now is not blamed, and whoever joined only loses its place.
        """
        if self._newest.get(topic) is not manifest:
            return
        if topic == WEIGHTS_TOPIC and manifest.version.ordinal < self.published.ordinal:  # the next is on its way
            self._blame_later(topic, manifest, link, what)
            return
        weights = f"weights {manifest.version.step}" if topic == WEIGHTS_TOPIC else "the frozen reference"
        what = f"{link.peer.actor} could not take {weights}: {what}"
        if not self._job.fleet.dismiss(link, what):
            self._problem = WeightsNotTaken(what)  # its setting, if there is one, stands in `what`
        self._reported.set()

    async def _until_all_hold(self) -> None:
        fleet: Fleet = self._job.fleet
        async with self._job.turn(ROLLOUT, f"weights {self.published_step} at every rollout"):
            while not all(self._holds_newest(actor) for actor in fleet.links("rollout")):
                await self._next_report()

    async def _next_report(self) -> None:
        """Or half a second: members may have left meanwhile. Raises what went wrong with the newest version."""
        self._reported.clear()
        self.check()
        try:
            await asyncio.wait_for(self._reported.wait(), 0.5)
        except asyncio.TimeoutError:
            return

    def _holds_newest(self, actor: str) -> bool:
        newest, report = self._newest.get(WEIGHTS_TOPIC), self._held.get(actor)
        return (newest is not None and newest.version == self.published and report is not None
                and (report.epoch, report.step) == (newest.version.epoch, newest.version.step)
                and report.digest == newest.digest)
