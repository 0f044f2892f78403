"""A policy that publishes from the device it trains on: engines take the weights of the step, verified there.

A CPU is in the place of the GPU: the same code, whose device memory is the host's.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cosmos_actor.actors.context import Context, SystemClock
from cosmos_actor.actors.worker import ThreadWorker
from cosmos_actor.bus import Identity
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.identity import new_incarnation
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.roles.engine import WeightsSpoiled
from cosmos_actor.roles.messages import (
    AskWeights,
    Demonstration,
    MendRequest,
    PublishReferenceRequest,
    PublishRequest,
    RestoreRequest,
    SftRequest,
    WeightsReport,
)
from cosmos_actor.roles.policy import PolicyRole
from cosmos_actor.roles.publishing import from_device
from cosmos_actor.roles.torch_engine import TorchEngine
from cosmos_actor.roles.weights_holder import WeightsHolder
from cosmos_actor.weight_plane.device_pull import DevicePull
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.transports.directory import from_directory
from cosmos_actor.weight_plane.transports.mapped import MappedTransport
from tests.trainer.make import EXAMPLES, MODEL
from tests.weight_plane.memory_bulk import MemoryBulk
from tests.weight_plane.transports.tools import QUICK

FLAGS = (f"policy.model={MODEL}", "policy.device=cpu", "policy.publish_dtype=bfloat16", "policy.threads=1",
         "rollout.device=cpu")


class OnDevice(PolicyRole):
    always_from_device = True


class Job:
    """A real policy, and a rollout's weights: an engine that takes what the policy announces."""

    def __init__(self, *flags: str) -> None:
        settings = resolve("grpo-arithmetic", (*FLAGS, *flags))
        identity = Identity("run", "policy", "policy-0", new_incarnation())
        self.store = BulkStore(identity, BulkSettings(budget_bytes=64 * MIB))
        self.workers, self.words, self.said = [ThreadWorker("policy"), ThreadWorker("rollout")], asyncio.Queue(), []
        self.policy = OnDevice(Context(identity, settings, seed=0, clock=SystemClock(), worker=self.workers[0],
                                       bulk_store=self.store, emit=self.words.put))
        self.policy.setup()
        self.policy.restore(RestoreRequest(None, 0, 0))
        self.transport = MappedTransport(QUICK, "cpu")
        subscriber = WeightSubscriber(MemoryBulk(), "run", device=DevicePull(lambda ref: self.transport))
        self.rollout = WeightsHolder(Context(
            Identity("run", "rollout", "rollout-0", new_incarnation()), settings, seed=0, clock=SystemClock(),
            worker=self.workers[1], weights=subscriber, emit=self._rollout_says))
        self.rollout.hold_nothing()
        self.rollout.engine = TorchEngine.from_settings(settings)

    async def _rollout_says(self, word: Any) -> None:
        self.said.append(word)
        if not isinstance(word, WeightsReport):  # an alarm: the controller has the policy look at its side
            self.mended = await self.policy.mend(MendRequest(word.epoch, word.step))

    async def train(self, step: int) -> None:
        shown = [Demonstration(np.array(p, np.int32), np.array(a, np.int32)) for p, a in EXAMPLES]
        await self.workers[0].run(self.policy.sft, SftRequest(0, step, shown))

    async def publish(self, step: int) -> Any:
        await self.policy.publish(PublishRequest(0, step))
        word = await asyncio.wait_for(self.words.get(), 20.0)
        return word.manifest

    async def digest(self) -> str:
        return await self.workers[0].run(lambda: weights_digest(self.policy.trainer.weights()))

    def flip(self, manifest: Any) -> str:
        entry = max(manifest.tensors, key=lambda entry: entry.nbytes)
        with self.policy.publishing._server.store.reading(manifest.buckets[entry.bucket].generation) as found:
            found.tensor[entry.offset + 5] ^= 1
        return entry.name

    def close(self) -> None:
        self.transport.close()
        self.policy.close()
        for worker in self.workers:
            worker.close()
        self.store.close()


def with_job(test: Any, *flags: str) -> None:
    async def run() -> None:
        job = Job(*flags)
        try:
            await asyncio.wait_for(test(job), 60.0)
        finally:
            job.close()

    asyncio.run(run())


@pytest.mark.parametrize("flags", [(), ("policy.lora.rank=2",)], ids=["whole", "adapter"])
def test_an_engine_takes_every_version_past_the_bulk_plane_into_memory_that_is_used_again(flags):
    async def test(job: Job) -> None:
        for step in range(4):
            manifest, expected = await job.publish(step), await job.digest()
            await job.train(step + 1)
            await job.rollout.on_weights(manifest)
            report = job.said[-1]
            assert (report.problem, report.step, report.digest) == ("", step, expected)
            proof = await job.rollout.prove(AskWeights())
            assert proof.digest == proof.expected == expected
            proof = await job.policy.prove(AskWeights())
            assert (proof.version, proof.digest, proof.expected) == (f"0.{step}", expected, expected)
        assert job.store.statistics()["puts"] == 0
        assert job.rollout.context.weights.statistics()["flats_made"] == 1

    with_job(test, *flags)


def test_versions_that_no_rollout_took_make_room_and_only_the_newest_is_kept():
    async def test(job: Job) -> None:
        for step in range(5):
            manifest, expected = await job.publish(step), await job.digest()
            await job.train(step + 1)
        await job.rollout.on_weights(manifest)
        assert job.said[-1].digest == expected

    with_job(test, "weights.keep=1")


def test_what_lies_damaged_on_the_device_is_an_alarm_and_made_anew_from_the_weights_of_the_same_step():
    async def test(job: Job) -> None:
        await job.publish(0)
        await job.train(1)
        manifest = await job.publish(1)
        damaged = job.flip(manifest)
        assert (await job.policy.prove(AskWeights())).digest != manifest.digest
        await job.rollout.on_weights(manifest)
        alarm, report = job.said
        assert (alarm.tensor, job.mended.tensors) == (damaged, [damaged])
        assert (report.problem, report.digest) == ("", manifest.digest)
        assert (await job.policy.prove(AskWeights())).digest == manifest.digest

    with_job(test)


def test_after_the_next_step_it_can_not_be_made_anew_and_that_is_said(capfd):
    async def test(job: Job) -> None:
        await job.rollout.on_weights(await job.publish(0))
        await job.train(1)
        manifest = await job.publish(1)
        await job.train(2)
        damaged = job.flip(manifest)
        await job.rollout.on_weights(manifest)
        assert job.mended.tensors == [] and f"tensor {damaged}" in job.said[-1].problem
        assert job.rollout.held.version.step == 0
        await job.rollout.on_weights(await job.publish(2))
        assert (job.said[-1].problem, job.said[-1].digest) == ("", await job.digest())

    with_job(test)
    assert "lie damaged on the GPU" in capfd.readouterr().err


def test_bytes_that_fall_over_between_pull_and_swap_are_found_before_the_first_is_copied():
    async def test(job: Job) -> None:
        manifest = await job.publish(0)
        tensors = await job.rollout.context.weights.pull(manifest, 20.0)
        next(iter(tensors.values())).view(-1)[0] += 1
        before = job.rollout.engine.read_back()
        with pytest.raises(WeightsSpoiled):
            job.rollout.engine.load_weights(tensors, 0, manifest.digest)
        assert job.rollout.engine.read_back() == before

    with_job(test)


def test_a_directory_and_the_frozen_reference_get_the_same_weights(tmp_path):
    async def test(job: Job) -> None:
        manifest = await job.publish(0)
        taken = from_directory(f"{tmp_path}/versions", run_id="run", step=0)
        assert taken.digest == manifest.digest == weights_digest(taken.tensors)
        request = PublishReferenceRequest(0, 0, str(tmp_path))
        reference = (await job.workers[0].run(job.policy.publish_reference, request)).manifest
        assert reference.digest == manifest.digest and job.store.statistics()["puts"] > 0

    with_job(test, f"weights.directory={tmp_path}/versions")


@pytest.mark.parametrize(("device", "flags", "there", "why"), [
    ("cuda", (), True, "every rollout is on this host"),
    ("cpu", (), False, "trains on the cpu"),
    ("cuda", ("weights.transport=shm",), False, "weights.transport = shm"),
    ("cuda", ("weights.transport=cuda_ipc",), True, "cuda_ipc"),
    ("cuda", ("weights.transport=nccl", "run.placement=disaggregated", "bus.host=0.0.0.0"), True, "nccl"),
    ("cuda", ("bus.host=0.0.0.0",), False, "rollouts of other hosts may join at bus.host = 0.0.0.0"),
    ("cuda", ("rollout.count=0",), False, "rollout.count = 0"),
    ("cuda", ("weights.delta=always",), False, "weights.delta = always"),
    ("cuda", ("run.grouping=single",), False, "processes of their own"),
])
def test_where_versions_are_published_from(device, flags, there, why):
    settings = resolve("grpo-arithmetic", ("policy.device=cuda", "rollout.device=cuda", *flags))
    found, reason = from_device(settings, device)
    assert found is there and why in reason
