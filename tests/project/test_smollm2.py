"""The recipe grpo-smollm2 as it is delivered but for the amount of work: its engine, its model, twenty updates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.in_flight import SHORT_ANSWERS, Up, cache, check, smollm2, up  # noqa: F401

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1200), pytest.mark.components]
UPDATES = 20


def test_the_torch_engine_holds_the_trainers_weights_at_every_version_of_twenty_updates(
        up: Up, smollm2: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("COSMOS_ACTOR_CACHE", str(cache))
    sets = {**SHORT_ANSWERS, "rollout.max_new_tokens": 8}
    _, fresh = check(up("torch", f"gguf:{smollm2}", UPDATES, sets), UPDATES)
    assert fresh >= 1
