"""vLLM's GPU build on a GPU: each case in a process of its own, with the Python that COSMOS_VLLM_PYTHON names.

Unset, it is this one: then vLLM has to be importable here. Models are of random weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.project.programs.vllm_gpu_all import QWEN3_06B, TINY
from tests.project.source import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
CASE_S = 600


def told(name: str, what: str) -> dict[str, Any]:
    """Also printed, for what it says of speed and memory: `pytest -s`."""
    python = os.environ.get("COSMOS_VLLM_PYTHON", sys.executable)
    command = [python, "-m", "tests.project.programs.vllm_gpu", name, what]
    done = subprocess.run(command, cwd=ROOT, timeout=CASE_S, capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL,
                          env={**os.environ, "OMP_NUM_THREADS": "4", "COSMOS_CASE_S": str(CASE_S - 20)})
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-4000:]
    print(lines[-1], flush=True)
    return json.loads(lines[-1])


@pytest.mark.parametrize("name", [TINY, QWEN3_06B], ids=["tiny", "0.6B"])
def test_versions_are_written_in_place_read_back_and_answered_with(name: str) -> None:
    assert told(name, "swaps")["wrong"] == []


def test_without_cuda_graphs_it_is_the_same() -> None:
    assert told(TINY, "eager")["wrong"] == []


@pytest.mark.parametrize("name", [TINY, QWEN3_06B], ids=["tiny", "0.6B"])
def test_a_sleep_gives_memory_back_and_its_level_decides_what_is_held(name: str) -> None:
    assert told(name, "sleep")["wrong"] == []


def test_adapters_alone_are_computed_with_on_a_gpu() -> None:
    assert told(TINY, "adapter")["wrong"] == []


@pytest.mark.parametrize("name", [TINY, QWEN3_06B], ids=["tiny", "0.6B"])
def test_fp8_is_named_by_what_was_sent_and_its_distance_is_told(name: str) -> None:
    assert told(name, "fp8")["wrong"] == []


def test_two_gpus_take_their_parts() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    assert told(TINY, "parallel")["wrong"] == []
