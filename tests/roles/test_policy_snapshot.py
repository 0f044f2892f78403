"""What the policy publishes while it trains on is what its weights were after the step that was asked for."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from cosmos_actor.actors.context import Context, SystemClock
from cosmos_actor.actors.worker import ThreadWorker
from cosmos_actor.bus import Identity
from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.identity import new_incarnation
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.roles.messages import (
    REFERENCE_TOPIC,
    Demonstration,
    MendRequest,
    NotPublished,
    Published,
    PublishReferenceRequest,
    PublishRequest,
    RestoreRequest,
    SftRequest,
)
from cosmos_actor.roles.policy import OutOfStep, PolicyRole
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.errors import WeightsCorrupt
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from tests.trainer.make import EXAMPLES, MODEL

FLAGS = (f"policy.model={MODEL}", "policy.device=cpu", "policy.publish_dtype=bfloat16", "policy.threads=1")


class Gate:
    """A store whose puts wait while the gate is shut."""

    def __init__(self, store: BulkStore) -> None:
        self.store, self.open, self.came = store, threading.Event(), threading.Event()
        self.open.set()

    def try_put(self, array: Any, **options: Any) -> Any:
        self.came.set()
        assert self.open.wait(20.0)
        return self.store.try_put(array, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Policy:
    """A real policy role with a worker, a bulk store, and somebody who pulls."""

    def __init__(self, budget_bytes: int = 64 * MIB) -> None:
        identity = Identity("run", "policy", "policy-0", new_incarnation())
        self.gate = Gate(BulkStore(identity, BulkSettings(budget_bytes=budget_bytes)))
        self.worker, self.words = ThreadWorker("policy"), asyncio.Queue()
        context = Context(identity, resolve("grpo-arithmetic", FLAGS), seed=0, clock=SystemClock(), worker=self.worker,
                          bulk_store=self.gate, emit=self.words.put)
        self.role = PolicyRole(context)
        self.role.setup()
        self.role.restore(RestoreRequest(None, 0, 0))
        self.subscriber = WeightSubscriber(BulkReader(), "run")

    async def train(self, step: int) -> Any:
        shown = [Demonstration(np.array(p, np.int32), np.array(a, np.int32)) for p, a in EXAMPLES]
        return await self.worker.run(self.role.sft, SftRequest(0, step, shown))

    async def digest(self) -> str:
        return await self.worker.run(lambda: weights_digest(self.role.trainer.weights()))

    async def pulled(self) -> tuple[int, str]:
        word = await asyncio.wait_for(self.words.get(), 20.0)
        assert isinstance(word, Published), word
        return word.manifest.version.step, weights_digest(await self.subscriber.pull(word.manifest, 20.0))

    def close(self) -> None:
        self.role.close()
        self.worker.close()
        self.gate.close()


def with_policy(test: Any, **options: Any) -> None:
    async def run() -> None:
        policy = Policy(**options)
        try:
            await asyncio.wait_for(test(policy), 60.0)
        finally:
            policy.gate.open.set()
            policy.close()

    asyncio.run(run())


def test_a_version_is_the_weights_of_its_step_while_later_steps_write_them():
    async def test(policy: Policy) -> None:
        copies = {}
        for step in range(1, 5):
            policy.gate.came.clear()
            policy.gate.open.clear()
            taken = await policy.role.publish(PublishRequest(0, step - 1))
            copies[step - 1] = await policy.digest()
            assert taken.step == step - 1
            assert await asyncio.to_thread(policy.gate.came.wait, 20.0)
            trained = await policy.train(step)  # while the version is hashed already, and not yet put
            assert trained.metrics["seconds/publish_stall"] == pytest.approx(taken.seconds)
            policy.gate.open.set()
            assert await policy.pulled() == (step - 1, copies[step - 1])
        assert len(set(copies.values())) == 4

    with_policy(test)


def test_versions_that_come_faster_than_they_leave_are_replaced_and_the_newest_arrives():
    async def test(policy: Policy) -> None:
        policy.gate.open.clear()
        first = await policy.digest()
        await policy.role.publish(PublishRequest(0, 0))
        assert await asyncio.to_thread(policy.gate.came.wait, 20.0)
        for step in (1, 2, 3):
            await policy.train(step)
            taken = await policy.role.publish(PublishRequest(0, step))
        assert taken.replaced == 2
        policy.gate.open.set()
        assert await policy.pulled() == (0, first)
        assert await policy.pulled() == (3, await policy.digest())
        await asyncio.gather(*policy.role.sending)
        assert policy.words.empty()

    with_policy(test)


def test_damage_to_the_frozen_reference_is_put_right_from_its_file(tmp_path):
    async def test(policy: Policy) -> None:
        request = PublishReferenceRequest(0, 0, str(tmp_path))
        manifest = (await policy.worker.run(policy.role.publish_reference, request)).manifest
        digest = await policy.digest()
        await policy.train(1)
        entry = manifest.tensors[-1]
        with policy.gate.store.reading(manifest.buckets[entry.bucket].generation) as block:
            block[entry.offset] ^= 1
        with pytest.raises(WeightsCorrupt):
            await policy.subscriber.pull(manifest, 20.0)
        assert (await policy.role.mend(MendRequest(0, 0))).tensors == []  # of the policy's own versions there is none
        assert (await policy.role.mend(MendRequest(0, 0, REFERENCE_TOPIC))).tensors == [entry.name]
        assert weights_digest(await policy.subscriber.pull(manifest, 20.0)) == manifest.digest == digest

    with_policy(test)


def test_too_little_shared_memory_is_said_in_one_line_and_training_goes_on():
    async def test(policy: Policy) -> None:
        await policy.role.publish(PublishRequest(0, 0))
        word = await asyncio.wait_for(policy.words.get(), 20.0)
        assert isinstance(word, NotPublished) and word.step == 0 and "\n" not in word.problem
        assert "raise bulk.budget_bytes above" in word.problem
        assert "for 3 as large" in word.problem, "two versions and the frozen reference"
        await policy.train(1)

    with_policy(test, budget_bytes=8192)


def test_a_version_of_another_step_is_refused_before_anything_is_copied():
    async def test(policy: Policy) -> None:
        with pytest.raises(OutOfStep, match="asked to publish step 5, the policy is at step 0"):
            await policy.role.publish(PublishRequest(0, 5))
        assert policy.words.empty() and not policy.role.sending

    with_policy(test)
