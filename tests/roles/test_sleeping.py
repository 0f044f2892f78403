"""An engine that sleeps has no memory and acts with nothing; it wakes as it was or without weights, and says which."""

from __future__ import annotations

import pytest
import torch

from cosmos_actor.roles.engine import KV_CACHE, WAKES, WEIGHTS, Asleep, EngineError, NoWeights, generate
from cosmos_actor.roles.torch_engine import TorchEngine
from cosmos_actor.trainer.model_weights import host_copies, named_tensors
from cosmos_actor.trainer.models import load_model
from cosmos_actor.trainer.policy import PolicyTrainer
from cosmos_actor.weight_plane.digest import weights_digest
from tests.roles.test_engine import items, make_engine, same, settings, weights_of
from tests.trainer.make import make_engine as engine_of
from tests.trainer.make import make_settings


def held_engine(seed: int = 1, version: int = 3) -> TorchEngine:
    engine, offered = make_engine(), weights_of(seed)
    engine.load_weights(offered, version, weights_digest(offered))
    return engine


def bytes_held(engine: TorchEngine) -> int:
    everything = [*engine.model.parameters(), *engine.model.buffers()]
    return sum(tensor.untyped_storage().nbytes() if tensor.numel() else 0 for tensor in everything)


def test_at_level_1_it_wakes_with_the_weights_that_it_had_and_the_same_answers():
    engine = held_engine()
    before, digest = engine.generate(items(), settings()), engine.read_back()
    for _ in range(2):
        engine.sleep(1)
        engine.sleep(1)
        assert bytes_held(engine) == 0 and engine.held.digest == digest
        engine.wake([WEIGHTS])
        engine.wake([KV_CACHE])
        assert engine.read_back() == digest
        assert all(same(a, b) for a, b in zip(engine.generate(items(), settings()), before, strict=True))


def test_at_level_2_its_weights_are_void_until_the_next_version_which_may_be_the_same():
    engine, offered = held_engine(), weights_of(1)
    before, digest = engine.generate(items(), settings()), weights_digest(offered)
    engine.sleep(2)
    assert bytes_held(engine) == 0 and engine.held.version == -1
    engine.wake(WAKES)
    for call in (lambda: engine.begin(items(), settings()), engine.read_back):
        with pytest.raises(NoWeights, match=r"dropped when it went to sleep \(rollout\.sleep_level = 2\)"):
            call()
    assert engine.load_weights(offered, 3, digest) == digest == engine.read_back()
    assert all(same(a, b) for a, b in zip(engine.generate(items(), settings()), before, strict=True))


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_it_refuses_by_name_whatever_needs_its_device(level):
    engine, offered = held_engine(), weights_of(2)
    engine.sleep(level)
    calls = [lambda: engine.begin(items(), settings()), engine.step, engine.read_back,
             lambda: engine.load_weights(offered, 9, weights_digest(offered))]
    for call in calls:
        with pytest.raises(Asleep, match=r"it sleeps while the policy has the GPU \(run\.colocated_offload\)"):
            call()
    engine.wake(WAKES)
    assert engine.load_weights(offered, 9, weights_digest(offered)) == weights_digest(offered)


def test_weights_go_in_before_the_cache_is_there_and_answers_come_after_it():
    engine, offered = held_engine(), weights_of(2)
    engine.sleep(2)
    engine.wake([WEIGHTS])
    engine.load_weights(offered, 4, weights_digest(offered))
    with pytest.raises(Asleep, match="no kv_cache on its device"):
        engine.begin(items(), settings())
    engine.wake([KV_CACHE])
    assert len(generate(engine, items(), settings())) == len(items())


def test_with_sequences_in_flight_it_does_not_go_to_sleep():
    engine = held_engine()
    batch = engine.begin(items(), settings())
    with pytest.raises(EngineError, match="in flight"):
        engine.sleep(1)
    while not batch.done:
        engine.step()
    engine.sleep(1)


@pytest.mark.parametrize("level", [1, 2])
def test_the_base_of_an_adapter_which_no_version_brings_comes_back_as_it_was(level):
    pytest.importorskip("peft")
    trainer = PolicyTrainer(make_settings(lora={"rank": 4}))
    engine = engine_of(trainer, version=1)
    before, weights = engine.generate(items(), settings()), trainer.weights()
    engine.sleep(level)
    assert bytes_held(engine) == 0
    engine.wake(WAKES)
    if level == 2:
        engine.load_weights(weights, 1, weights_digest(weights))
    assert engine.read_back() == weights_digest(weights)
    assert all(same(a, b) for a, b in zip(engine.generate(items(), settings()), before, strict=True))


def test_a_version_that_does_not_fit_leaves_dropped_weights_void():
    engine = held_engine()
    engine.sleep(2)
    engine.wake(WAKES)
    with pytest.raises(EngineError):
        engine.load_weights({}, 5, weights_digest({}))
    with pytest.raises(NoWeights):
        engine.begin(items(), settings())


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_on_a_gpu_it_leaves_nothing_behind_not_even_a_graph(level):
    name = "tiny:qwen3?hidden=1024&layers=4&heads=8&kv_heads=8&intermediate=4096&vocab=32&positions=64"
    engine = TorchEngine(load_model(name, device="cuda"), stop_ids=(2,), pad_id=0)
    before, digest = engine.generate(items(), settings()), engine.read_back()  # under a CUDA graph
    weights = host_copies(named_tensors(engine.model).items())
    for version in range(2):
        engine.sleep(level)
        assert torch.cuda.memory_reserved() < 64 << 20
        engine.wake([WEIGHTS])
        if level == 2:
            engine.load_weights(weights, version, digest)
        engine.wake([KV_CACHE])
        assert engine.read_back() == digest
        assert all(same(a, b) for a, b in zip(engine.generate(items(), settings()), before, strict=True))
