"""New weights in the middle of answers: vLLM in each of its ways, and twenty updates of grpo-smollm2 by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.in_flight import LONG_ANSWERS, SHORT_ANSWERS, Up, cache, check, smollm2, up  # noqa: F401
from tests.project.test_vllm import CLOSE, python, told  # noqa: F401

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(2400), pytest.mark.components]
MODEL = "tiny:qwen3?hidden=64&layers=2&heads=2&kv_heads=1&intermediate=96&vocab=40&positions=128"
SMALL = "tiny:qwen3?hidden=64&layers=2&heads=2&kv_heads=1&intermediate=96&vocab=32&positions=256"


def test_every_token_is_of_the_version_that_it_tells(python: Path, tmp_path: Path) -> None:  # noqa: F811
    found = told(python, tmp_path, MODEL, program="vllm_in_flight.py")
    assert found["wait"]["versions"] == [[1], [2]] and found["wait"]["mixed"] == 0 and found["wait"]["off"] < CLOSE
    for mode in ("keep", "recompute", "abort"):
        assert found[mode]["versions"] == [[1, 2, 3], [2, 3]] and found[mode]["mixed"] >= 16
    for mode in ("recompute", "abort"):
        assert found[mode]["off"] < CLOSE < 1.0 < found[mode]["kept_off"]
    assert found["keep"]["kept_off"] < CLOSE < 1.0 < found["keep"]["off"]  # exact for what it is, and of no version

    within, again, after, after_again = found["cached"]
    assert 0 < within < again and (after, after_again) == (within, again)  # shared in a version, never across
    assert found["dropped"] == {"done": [False, True], "in_flight": False}
    assert found["lost"]["said"].startswith("WeightsLost") and not found["lost"]["in_flight"]
    assert found["lost"]["then"].startswith("NoWeights")


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_twenty_updates_with_new_weights_in_the_middle_of_nearly_all_answers(engine: str, up: Up) -> None:  # noqa: F811
    mixed, fresh = check(up(engine, SMALL, 20, LONG_ANSWERS), 20)
    assert mixed >= 5 and fresh >= 6


def test_grpo_smollm2_trains_on_answers_whose_weights_are_the_trainers_at_every_version(
        smollm2: Path, cache: Path, up: Up, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("COSMOS_ACTOR_CACHE", str(cache))
    mixed, fresh = check(up("vllm", f"gguf:{smollm2}", 20, SHORT_ANSWERS), 20)
    assert fresh >= 1 and mixed >= 1
