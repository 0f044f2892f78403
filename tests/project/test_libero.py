"""LIBERO, installed by `make .venv-libero/.stamp`: what the adapter says of it, and the same bits over the bridge."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.interpreters import find_python, require_python
from tests.project.conftest import clean_environment
from tests.project.environments import made
from tests.project.source import ROOT

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1900), pytest.mark.components]
INSTALL_S, RUN_S = 900, 900
PICTURES = "libosmesa6 libegl1 libgl1 libgles2 libegl-mesa0 libgl1-mesa-dri libgbm1"
CONFORMANCE = """
import sys
from cosmos_actor.simulator_bridge.conformance import of_process
of_process.MEMORY_S, of_process.OPENED_S = 30.0, 30.0  # an environment takes five seconds to open
from cosmos_actor.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """Of LIBERO's environment, made where it is not there yet. Without Mesa a test is skipped, and fails in CI."""
    if ctypes.util.find_library("OSMesa") is None:
        reason = f"LIBERO's pictures need libOSMesa: apt-get install {PICTURES}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    base = find_python("3.11") or require_python("3.10")
    return made("libero", INSTALL_S, LIBERO_PYTHON=base)


def run(command: list[Any], limit_s: float) -> str:
    """stdout of a command that must succeed. The cosmos_actor of LIBERO's environment is this checkout."""
    environment = {**clean_environment(), "MUJOCO_GL": "osmesa", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in command], cwd=ROOT, timeout=limit_s, capture_output=True, text=True,
                          env=environment, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_pictures_state_gripper_and_beginnings_are_liberos_and_the_expert_is_done(python: Path) -> None:
    found = json.loads(run([python, ROOT / "tests/project/programs/libero_conventions.py"], RUN_S))
    same = {"agent": 0.0, "wrist": 0.0, "state": 0.0}
    assert found["raw"] == same  # turned by 180 degrees, after ten settling steps, in its third initial state
    assert found["again"] == same  # after two other episodes, by a reset that makes nothing anew
    assert found["instruction"] == "pick up the alphabet soup and place it in the basket"
    assert found["initial_states"] == 50
    assert found["fingers_open"] > 0.07 and found["fingers_closed"] < 0.02  # a policy's 1 and 0
    assert 50 < found["expert_steps"] < 200
    assert found["closed_the_other_task"]


def test_the_recipe_goes_through_every_role_on_the_cpu(python: Path, tmp_path: Path) -> None:
    """Recorded, cloned, evaluated with a video, reinforced: small, since two cores draw ten pictures a second."""
    kind = "libero:libero_object?tasks=0&size=64"
    demonstrations, run_dir = tmp_path / "demonstrations", tmp_path / "run"
    run([python, "-m", "cosmos_actor.cli", "sim", "record", kind, "--out", demonstrations, "--episodes", "1"], RUN_S)
    small = {
        "run.steps": 1, "run.eval_every": 1, "data.prompts_per_step": 2, "rollout.chunk_prompts": 2,
        "policy.sft_steps": 2, "policy.sft_batch": 8, "sim.kind": kind, "sim.python": python, "sim.count": 2,
        "sim.envs": 1, "sim.fragment_steps": 2, "sim.eval_trials": 1, "sim.options.max_steps": 24,
        "sim.env.MUJOCO_GL": "osmesa", "control.cloning.demonstrations": demonstrations, "control.flow.width": 32,
        "control.ppo.mini_batches": 2, "control.ppo.kl_coefficient": 0.01, "critic.count": 1}
    sets = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    run([sys.executable, "-m", "cosmos_actor.cli", "up", "vla-libero", "--run-dir", run_dir, *sets], RUN_S)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["phase"]) for line in lines if line["phase"] != "eval"] == [
        (1, "cloning"), (2, "cloning"), (3, "ppo")]
    evaluations = [line for line in lines if line["phase"] == "eval"]
    assert [line["step"] for line in evaluations] == [2, 3]
    assert all((line["eval/episodes"], line["eval/errors"]) == (1, 0) for line in evaluations)
    assert lines[-1]["critic/loss/value"] >= 0 and lines[-1]["env_steps"] == 2 * 2 * 8
    assert len(list((run_dir / "videos").glob("*/*.mp4"))) == 2


def test_it_keeps_what_is_asked_of_a_simulator(python: Path) -> None:
    kind = "libero:libero_object?tasks=0&size=64"
    told = json.loads(run([python, "-c", CONFORMANCE, "sim", "test", kind, "--steps", "5", "--json"], RUN_S))
    assert told["passed"], told
    assert {check["check"] for check in told["checks"] if check["status"] == "skipped"} <= {
        "different seeds differ", "an ended slot stays as it was", "memory does not grow"}


def test_observations_are_the_same_bytes_over_the_bridge(python: Path, tmp_path: Path) -> None:
    run([sys.executable, ROOT / "benchmarks/libero.py", "--sim-python", python, "--episodes", "4", "--steps", "16",
         "--block", "2", "--chunked", "2", "--size", "64", "--json", tmp_path / "found.json"], RUN_S)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["compared"], found["different"]) == (4 * 17, 0)
    assert (found["compared_chunks"], found["different_chunks"]) == (2 * 3, 0)
