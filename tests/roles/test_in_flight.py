"""New weights in the middle of answers: every token is sampled by, and stamped with, the version that was held then."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cosmos_actor.actors.context import Context, SystemClock
from cosmos_actor.actors.trajectory import GenerateTask
from cosmos_actor.actors.worker import ThreadWorker
from cosmos_actor.bus import Identity
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.roles.engine import EngineError
from cosmos_actor.roles.messages import GenerationRequest
from cosmos_actor.roles.rollout import RolloutRole
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.torch_engine import TorchEngine
from cosmos_actor.trainer.model_weights import host_copies, named_tensors
from cosmos_actor.trainer.models import load_model
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.version import Version
from tests.roles.in_flight import LONG, compared, items, mixed, off, offer, three_versions, versions_of

MODEL = "tiny:qwen3?hidden=32&layers=2&heads=2&kv_heads=1&intermediate=64&vocab=32&positions=128"
CLOSE = 1e-4
"""nats, of float32."""


@pytest.fixture(scope="module")
def models():
    made = {version: load_model(MODEL, seed=version).eval() for version in (1, 2, 3)}
    for version, model in made.items():
        for parameter in model.parameters():
            parameter.data *= 1.0 + 2.0 * version * (parameter.ndim > 1)  # far enough apart to be told from each other
    return made


def engine(mode: str) -> TorchEngine:
    return TorchEngine(load_model(MODEL, seed=0), stop_ids=(2,), pad_id=0, on_new_weights=mode)


@pytest.mark.parametrize("mode", ["wait", "keep", "recompute", "abort"])
def test_every_token_is_of_the_version_that_it_tells(models, mode: str) -> None:
    batches = three_versions(engine(mode), models, 1, temperature=0.8)
    assert off(models, batches, 0.8, kept=mode == "keep") < CLOSE
    if mode == "wait":
        assert versions_of(batches) == [[1], [2]] and mixed(batches) == 0
    else:
        assert versions_of(batches)[0] == [1, 2, 3] and mixed(batches) > 10
    if mode == "keep":
        assert off(models, batches, 0.8) > 100 * CLOSE  # of no version
    else:
        assert off(models, batches, 0.8, kept=True) > 100 * CLOSE or mode == "wait"


@pytest.mark.parametrize("mode", ["wait", "keep", "recompute", "abort"])
def test_an_engine_that_computes_right_is_near_the_trainer_in_what_the_newest_weights_sampled(models, mode) -> None:
    made = engine(mode)
    batches = three_versions(made, models, 1, temperature=0.8)
    batches.append(made.begin(items(200), SamplingSettings(max_new_tokens=16, temperature=0.8)))
    while made.in_flight:
        made.step()
    found = compared(models[3], batches, 0.8)
    assert found["mismatch/newest_whole_max"] < CLOSE
    assert (found["mismatch/newest_max"] > 100 * CLOSE) is (mode == "keep")


def test_an_engine_that_waits_takes_nothing_in_the_middle_of_answers(models) -> None:
    made = engine("wait")
    batch = made.begin(items(), SamplingSettings(max_new_tokens=4))
    with pytest.raises(EngineError, match=r"rollout\.on_new_weights = \"wait\""):
        offer(made, models[1], 1)
    made.drop(batch)
    offer(made, models[1], 1)


class Source:
    """Weights of version v are those of `models[v]`."""

    def __init__(self, models: Any) -> None:
        self.models = models

    def manifest(self, step: int) -> Manifest:
        return Manifest(Version("run", 0, step), weights_digest(self.tensors(step)), [], [])

    def tensors(self, step: int) -> Any:
        return host_copies(named_tensors(self.models[step]).items())

    async def pull(self, manifest: Manifest, deadline_s: float) -> Any:
        return self.tensors(manifest.version.step)


@pytest.mark.parametrize("mode", ["wait", "recompute"])
def test_a_rollout_takes_weights_in_the_middle_of_its_groups_or_after_them(models, mode: str) -> None:
    settings = resolve("grpo-arithmetic", [
        f'policy.model="{MODEL}"', f'rollout.on_new_weights="{mode}"', "rollout.max_new_tokens=100"])
    worker, reports = ThreadWorker("test"), []

    async def emit(report: Any) -> None:
        reports.append((report.step, report.problem))

    async def run() -> Any:
        source = Source(models)
        role = RolloutRole(Context(Identity("run", "rollout", "rollout-0", "1"), settings, seed=0, clock=SystemClock(),
                                   worker=worker, weights=source, emit=emit))
        await worker.run(role.setup)
        await role.on_weights(source.manifest(1))
        before = role.engine.statistics()["seconds"]
        task = GenerateTask("g0", 0, {}, np.array(LONG[:20], np.int32), samples=8, seed=3)
        asked = asyncio.ensure_future(role.generate(GenerationRequest([task], 1, 0, False, 60.0)))
        while not (asked.done() or (role.engine.in_flight if mode == "wait"
                                    else role.engine.statistics()["seconds"] > before)):
            await asyncio.sleep(0.001)
        await role.on_weights(source.manifest(2))
        assert asked.done() == (mode == "wait")
        return await asked

    answer = asyncio.run(run())
    worker.close()
    [group] = answer.groups
    assert reports == [(1, ""), (2, "")] and answer.seconds > 0
    assert set(group.versions.tolist()) == ({1} if mode == "wait" else {1, 2}) and group.version_dispatch == 1
    assert set(answer.weights) == ({"0.1"} if mode == "wait" else {"0.1", "0.2"})
