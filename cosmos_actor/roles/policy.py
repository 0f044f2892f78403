"""Policy: trains, publishes what it trained, saves and restores it."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.actors.role import handles
from cosmos_actor.bus.errors import BusError
from cosmos_actor.roles.array_file import read_arrays, write_arrays
from cosmos_actor.roles.messages import (
    REFERENCE_TOPIC,
    AskWeights,
    Mended,
    MendRequest,
    NotPublished,
    Published,
    PublishReferenceRequest,
    PublishRequest,
    Restored,
    RestoreRequest,
    Saved,
    SaveRequest,
    SftRequest,
    Snapshotted,
    UpdateReply,
    UpdateRequest,
    WeightsProof,
)
from cosmos_actor.roles.publishing import DevicePublishing, HostPublishing, from_device
from cosmos_actor.roles.stateful import StatefulRole
from cosmos_actor.roles.turn_messages import ParkRequest, TurnBegun, TurnOver, UnparkRequest
from cosmos_actor.roles.turn_taking import TurnOrder
from cosmos_actor.simulator_bridge.mistakes import one_line
from cosmos_actor.weight_plane.on_the_plane import put_right
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.transports.serving import served
from cosmos_actor.weight_plane.version import Version

REFERENCE_FILE = "reference.npz"
FROZEN_REMEDY = "put it back, or start a new run: another reference is another loss"
SHOWN_VERSIONS = 32
"""Of a job that is quick; more than it publishes between two words of an actor."""


class OutOfStep(Exception):
    """The controller asked for another step than the next one: one of the two missed a rewind."""


class PolicyRole(StatefulRole):
    """Guarantee: step k of the optimiser happens once in a life of the job; asked for again, its answer is repeated.

    A version is a snapshot: the next step begins as soon as it is taken, and nothing that it writes is published.
    Where it has its GPU in turn with the rollouts the model is made at its first restore, which comes in its own turn.
    """

    name = "policy"
    always_from_device = False
    """For tests, which have a CPU in the place of a GPU."""

    def setup(self) -> None:
        settings = self.context.settings
        self.trainer: Any = None
        if self.context.takes_turns:
            importlib.import_module("cosmos_actor.trainer.ranks")  # takes seconds, and its first turn has a deadline
        else:
            self.trainer = self._make_trainer()
        self.order = TurnOrder()
        self.step = 0
        self.answer: UpdateReply | None = None
        wanted = settings.weights
        self.store = served(self.context.bulk_store, wanted.transport, wanted.protection)
        in_budget = wanted.keep + min(1, settings.reference_count)
        self.publishing = self._make_publishing(in_budget)
        self.outbox = self.publishing.outbox
        self.recent: dict[str, str] = {}
        """Version -> digest of the newest published, for `status`: an engine's word may be of a second ago."""
        self.published_at = 0.0
        """When the newest version was, in seconds after 1970."""
        self.stall_s = 0.0
        """What snapshots have cost since the last step."""
        self.sending: set[asyncio.Task[None]] = set()
        self.references = WeightPublisher(self.store, keep=1, in_budget=in_budget)
        self.frozen: Path | None = None
        """The file of the reference that was published."""

    def _make_publishing(self, in_budget: int) -> HostPublishing | DevicePublishing:
        settings = self.context.settings
        if self.context.takes_turns:  # what lies on the GPU then is the rollouts' to use
            return HostPublishing(self.context, self.store, in_budget)
        device = self.trainer.world.device if settings.run.experience == "text" else None
        there, why = from_device(settings, "cpu" if device is None else device.type)
        if there or (device is not None and device.type == "cuda"):
            print(f"weights are published from the {'GPU' if there else 'host'}: {why}", file=sys.stderr, flush=True)
        if not there and not self.always_from_device:
            return HostPublishing(self.context, self.store, in_budget)
        publishing = DevicePublishing(self.context, device)
        publishing.prepare(self.trainer)
        return publishing

    def _make_trainer(self) -> Any:
        from cosmos_actor.trainer.ranks import RankedTrainer

        settings = self.context.settings
        return RankedTrainer(settings.policy, temperature=settings.rollout.logprob_temperature)

    def close(self) -> None:
        self.publishing.close()
        if self.trainer is not None:
            self.trainer.close()

    def weights_held(self) -> str:
        return str(self.step)

    def weights_proof(self) -> dict[str, Any]:
        manifest = self.publishing.newest
        return {} if manifest is None else {
            "version": str(manifest.version), "digest": manifest.digest, "since": self.published_at,
            "recent": dict(self.recent)}

    @handles(SftRequest)
    def sft(self, request: SftRequest) -> UpdateReply:
        return self._once(request, lambda: self.trainer.sft_step(
            [(shown.prompt, shown.answer) for shown in request.demonstrations]))

    @handles(UpdateRequest)
    def update(self, request: UpdateRequest) -> UpdateReply:
        rewards = np.concatenate([group.rewards for group in request.groups])
        seen = {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        return self._once(request, lambda: {**self.trainer.grpo_step(request.groups), **seen})

    def _once(self, request: Any, update: Callable[[], Mapping[str, float]]) -> UpdateReply:
        self.refuse_another_life(request.epoch)
        step = request.step
        if self.answer is not None and step == self.step:
            return self.answer
        if step != self.step + 1:
            raise OutOfStep(f"asked for step {step}, the policy is at step {self.step}")
        begun = self.context.clock.monotonic()
        metrics = {**update(), "seconds/publish_stall": self.stall_s, **self._memory()}
        self.step, self.stall_s = step, 0.0
        self.answer = UpdateReply(step, metrics, self.context.clock.monotonic() - begun)
        return self.answer

    def _memory(self) -> dict[str, int]:
        """Of the GPU, since the policy's turn began."""
        peak, used = self.trainer.memory() if self.context.takes_turns else (0, 0)
        return {"memory/policy_peak_bytes": peak, "memory/policy_used_bytes": used} if used else {}

    @handles(PublishRequest)
    async def publish(self, request: PublishRequest) -> Snapshotted:
        """The weights after `request.step`; they leave later. Raises OutOfStep when the policy is elsewhere."""
        taken: Snapshotted = await self.context.compute("snapshot", self._snapshot, request)
        task = asyncio.get_running_loop().create_task(self._send(request))
        self.sending.add(task)
        task.add_done_callback(self.sending.discard)
        return taken

    def _snapshot(self, request: PublishRequest) -> Snapshotted:
        self.refuse_another_life(request.epoch)
        if request.step != self.step:
            raise OutOfStep(f"asked to publish step {request.step}, the policy is at step {self.step}")
        begun = self.context.clock.monotonic()
        self.publishing.make_room()
        self.outbox.offer(self._version(request), self.trainer.snapshot())
        seconds = self.context.clock.monotonic() - begun
        self.stall_s += seconds
        return Snapshotted(request.step, seconds, self.outbox.replaced)

    async def _send(self, request: PublishRequest) -> None:
        """Publish the newest snapshot and say so, or why that could not be done."""
        try:
            word: Any = await asyncio.get_running_loop().run_in_executor(self.outbox.thread, self._publish)
            if word is None:
                return
        except Exception as error:  # of any kind: what is not said, the job would wait for to its deadline
            word = NotPublished(request.epoch, request.step, one_line(error))
        try:
            await self.context.emit(word)
        except BusError:
            pass  # who controlled is gone, and its successor begins another life

    def _publish(self) -> Published | None:
        begun = self.context.clock.monotonic()
        manifest = self.outbox.send()
        if manifest is None:
            return None
        self.published_at = self.context.clock.wall()
        kept = list(self.recent.items())[1 - SHOWN_VERSIONS:]
        self.recent = dict([*kept, (str(manifest.version), manifest.digest)])
        return Published(manifest, self.context.clock.monotonic() - begun)

    @handles(AskWeights)
    async def prove(self, question: AskWeights) -> WeightsProof:
        """The digest of the bytes that others pull now. Beside a step, after what is being published."""
        return await asyncio.get_running_loop().run_in_executor(self.outbox.thread, self._prove)

    def _prove(self) -> WeightsProof:
        manifest, begun = self.publishing.newest, self.context.clock.monotonic()
        if manifest is None:
            return WeightsProof("", "", "", 0.0)
        digest = self.publishing.digest_now(manifest)
        return WeightsProof(str(manifest.version), digest, manifest.digest, self.context.clock.monotonic() - begun)

    @handles(MendRequest)
    async def mend(self, request: MendRequest) -> Mended:
        self.refuse_another_life(request.epoch)
        if request.topic != REFERENCE_TOPIC and self.publishing.mends_from_weights:
            return await self.context.compute("mend", self._mend, request)  # type: ignore[no-any-return]
        return await asyncio.get_running_loop().run_in_executor(self.outbox.thread, self._mend, request)

    def _mend(self, request: MendRequest) -> Mended:
        if request.topic == REFERENCE_TOPIC:
            return self._mend_reference(self._version(request))
        manifest = self.publishing.newest
        if manifest is None or manifest.version != self._version(request):
            return Mended([])
        mended, why_not = self.publishing.mend(manifest, self.trainer, self.step)
        if why_not:
            print(why_not, file=sys.stderr, flush=True)
        return Mended(mended)

    def _mend_reference(self, wanted: Version) -> Mended:
        manifest = self.references.newest
        if manifest is None or manifest.version != wanted or self.frozen is None:
            return Mended([])
        return Mended(put_right(self.context.bulk_store, manifest, read_arrays(self.frozen, FROZEN_REMEDY)))

    @handles(PublishReferenceRequest)
    def publish_reference(self, request: PublishReferenceRequest) -> Published:
        """The frozen reference: as it was first frozen in this run, or the present weights, frozen by this."""
        self.refuse_another_life(request.epoch)
        begun = self.context.clock.monotonic()
        self.frozen = Path(request.directory) / REFERENCE_FILE
        tensors = self._reference(self.frozen)
        manifest = self.references.publish(self._version(request), tensors)
        return Published(manifest, self.context.clock.monotonic() - begun)

    def _version(self, request: Any) -> Version:
        return Version(self.context.identity.run_id, request.epoch, request.step)

    def _reference(self, path: Path) -> Mapping[str, np.ndarray]:
        if path.exists():
            return read_arrays(path, FROZEN_REMEDY)
        tensors: Mapping[str, np.ndarray] = self.trainer.weights()
        write_arrays(path, tensors)
        return tensors

    @handles(ParkRequest)
    def park(self, request: ParkRequest) -> TurnOver:
        """Leave the device. What is being published lies on the host already."""
        self.refuse_another_life(request.epoch)
        self.order.accept(request)
        begun, (peak, used) = self.context.clock.monotonic(), self.trainer.memory()
        self.trainer.park()
        return TurnOver(self.context.clock.monotonic() - begun, peak, used)

    @handles(UnparkRequest)
    def unpark(self, request: UnparkRequest) -> TurnBegun:
        self.refuse_another_life(request.epoch)
        self.order.accept(request)
        begun = self.context.clock.monotonic()
        self.trainer.unpark()
        return TurnBegun(self.context.clock.monotonic() - begun)

    @handles(SaveRequest)
    def save(self, request: SaveRequest) -> Saved:
        self.refuse_another_life(request.epoch)
        if request.step != self.step:
            raise OutOfStep(f"asked to save step {request.step}, the policy is at step {self.step}")
        with self.pause(f"checkpoint {request.step}"):
            self.trainer.save(Path(request.directory) / self.name)
        return Saved(self.name, request.step)

    @handles(RestoreRequest)
    def restore(self, request: RestoreRequest) -> Restored:
        self.begin_life(request.epoch)
        self.outbox.clear()
        if self.trainer is None:
            with self.pause("the start of the model"):
                self.trainer = self._make_trainer()
        if self.context.takes_turns:
            self.trainer.unpark()
        if request.directory is not None:
            with self.pause(f"checkpoint {request.step}"):
                self.trainer.load(Path(request.directory) / self.name)
        elif self.step != 0:
            self.trainer.reset()
        self.step, self.answer, self.stall_s = request.step, None, 0.0
        return Restored(self.name, self.step)
