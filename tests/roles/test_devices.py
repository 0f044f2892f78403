"""Each role computes where its own section says, whatever the policy's says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cosmos_actor.recipes.resolve import resolve

pytest.importorskip("torch")

from cosmos_actor.roles.reference import ReferenceRole
from cosmos_actor.roles.torch_engine import TorchEngine

TINY = 'policy.model="tiny:qwen3?hidden=16&layers=1&heads=2&kv_heads=1&intermediate=16&vocab=32&positions=16"'


@pytest.fixture
def settings():
    """The policy's device is one that this machine may not have."""
    return resolve("grpo-arithmetic", [TINY, "policy.device=cuda", "policy.threads=2", "reference.device=cpu",
                                       "reference.threads=1", "rollout.device=cpu", "rollout.threads=1"])


def test_the_reference_is_on_its_own_device(settings):
    role = ReferenceRole(SimpleNamespace(settings=settings))
    role.setup()
    assert next(role.scorer.model.parameters()).device.type == "cpu"
    assert role.scorer._threads == 1


def test_the_rollouts_engine_is_on_its_own_device(settings):
    engine = TorchEngine.from_settings(settings)
    assert engine.device.type == "cpu" and engine._threads == 1
