"""vLLM's weight transfer from the weight plane: two workers that share a model, and one that a user of vLLM drives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from cosmos_actor.roles.vllm_plugin.lives import LOST_A_WORKER
from tests.job.runs import Run, kill
from tests.project.conftest import clean_environment
from tests.project.source import ROOT
from tests.project.test_vllm import CLOSE, QWEN3, RUN_S, job, python  # noqa: F401
from tests.waiting import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(2400), pytest.mark.components]


@contextmanager
def running(interpreter: Path, name: str, what: str, *paths: Path) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """The program after its line, which is given too; killed at the end."""
    command = [str(interpreter), str(ROOT / "tests/project/programs/vllm_plugin.py"), name, what]
    environment = {**clean_environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = next((text for text in process.stdout if text.startswith("{")), "")
        assert line, process.stderr.read()[-3000:]
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=RUN_S)


def ended(pids: list[int]) -> None:
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of vLLM's workers", within_s=20)


def test_two_workers_take_their_parts_and_a_lost_one_takes_the_rollout_with_it(python: Path) -> None:  # noqa: F811
    with running(python, QWEN3, "parallel") as (process, found):
        assert max(found["off"]) < CLOSE and found["digest"] and found["read_back"]
        assert found["loaders"] and found["plan"]  # as vLLM's loaders cut whole tensors, and as the plan does
        assert found["corrupt"].startswith("WeightsRefused") and "its bytes are not those" in found["corrupt"]
        assert found["still"] and found["then"] == "3" and found["names"] == []
        workers = [pid for pid in found["processes"] if "Worker" in "".join(psutil.Process(pid).cmdline())]
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        assert process.wait(30) == LOST_A_WORKER and process.stderr is not None
        assert f"VllmWorker-1 (pid {workers[1]}) of vLLM ended with exit code -9" in process.stderr.read()
        ended(found["processes"])


def test_vllm_pulls_what_its_user_tells_it_of_and_its_worker_dies_with_it(
        python: Path, tmp_path: Path) -> None:  # noqa: F811
    """The entry point is as an installation writes it."""
    made = subprocess.run([sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "egg_info",
                           "--egg-base", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "cosmos = cosmos_actor.roles.vllm_plugin:register" in next(tmp_path.glob("*/entry_points.txt")).read_text()
    with running(python, QWEN3, "alone", tmp_path) as (process, found):
        assert found["registered"] and max(found["off"]) < CLOSE
        assert found["versions"] == ["default", "default", "0.1", "0.1", "0.3"]  # after finish, and not before
        assert "NotTaken" in found["corrupt"] or "WeightsCorrupt" in found["corrupt"]
        assert found["still"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        ended(found["processes"])


def test_a_job_with_two_workers_leaves_none_when_its_supervisor_is_killed(job: Run) -> None:  # noqa: F811
    process = job.start(sets=["rollout.tensor_parallel=2"])
    job.until_step(6)
    assert all(line["logprob/engine_distance_max"] < CLOSE for line in job.metrics() if line["phase"] == "grpo")
    rollout = psutil.Process(job.pid("rollout-0"))
    family = [rollout.pid, *(child.pid for child in rollout.children(recursive=True))]
    assert len(family) >= 3
    kill(process.pid)
    process.wait(30)
    ended(family)
    eventually(lambda: job.processes() == [], "the end of the job's processes", within_s=20)
