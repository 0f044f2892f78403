"""vLLM in its own environment, made by `make .venv-vllm/.stamp`: the engine's promises, and a job whose rollout it is.
"""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.interpreters import require_python
from tests.job.runs import Run, kill
from tests.project.conftest import clean_environment
from tests.project.environments import made
from tests.project.source import ROOT
from tests.waiting import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(2400), pytest.mark.components]
INSTALL_S, RUN_S, JOB_S = 1200, 600, 900
"""Importing vLLM alone takes ten seconds of a processor, and most of a minute on a busy machine."""
CLOSE = 1e-4
"""nats, of float32; the log-probs of these models' answers go down to -20."""
QWEN3 = "tiny:qwen3?hidden=64&layers=2&heads=2&kv_heads=1&intermediate=96&vocab=40&positions=64"
SMALL_HEADS = "tiny:qwen3?hidden=32&layers=1&heads=2&kv_heads=1&intermediate=64&vocab=40&positions=64"
LONG = "tiny:qwen3?hidden=256&layers=16&heads=4&kv_heads=2&intermediate=64&vocab=40&positions=200000"
SIZES = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "max_position_embeddings": 64}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, **SIZES},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False, **SIZES},  # biases, its own head
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 2, "n_layer": 1, "n_positions": 64,
             "vocab_size": 40},  # its matrices are the other way round
}


@pytest.fixture(scope="module")
def python() -> Path:
    """Of vLLM's environment, made where it is not there yet. Where there is no wheel of it a test is skipped."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        pytest.skip(f"constraints-vllm.txt has wheels for Linux on x86_64, not for {platform.platform()}")
    base = require_python("3.11")
    return made("vllm", INSTALL_S, VLLM_PYTHON=base)


def model_directory(folder: Path, name: str) -> str:
    """As policy.model takes it; a configuration is enough, since an engine begins without weights."""
    if name not in MODELS:
        return name
    (folder / "config.json").write_text(json.dumps({"model_type": name, **MODELS[name]}))
    return str(folder)


def run(python: Path, folder: Path, name: str, *what: str, program: str = "vllm_engine.py"
        ) -> subprocess.CompletedProcess[str]:
    command = [python, ROOT / "tests/project/programs" / program, model_directory(folder, name), *what]
    return subprocess.run([str(word) for word in command], cwd=ROOT, timeout=RUN_S, capture_output=True, text=True,
                          env={**clean_environment(), "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, check=False)


def told(python: Path, folder: Path, name: str, *what: str, program: str = "vllm_engine.py") -> dict[str, Any]:
    done = run(python, folder, name, *what, program=program)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [QWEN3, "llama", "qwen2"], ids=["qwen3", "llama", "qwen2"])
def test_answers_are_those_of_the_version_held_and_a_swap_is_whole_or_not_at_all(
        python: Path, tmp_path: Path, name: str) -> None:
    found = told(python, tmp_path, name, "swaps")
    swaps, answers, head = found["swaps"], found["answers"], found["head"]
    assert found["processes"] == []  # no engine core, nor anything else that could be left behind
    assert swaps["before"].startswith("NoWeights")
    assert all(version["digest"] and version["off"] < CLOSE for version in swaps["versions"])
    assert swaps["refused"].pop("stale").startswith("StaleWeights")
    assert swaps["refused"].pop("digest").startswith("WeightsSpoiled: version 4")
    assert all(line.startswith("WeightsRefused: version 4") for line in swaps["refused"].values())
    assert "1.mlp.up_proj" in swaps["refused"]["missing"] and "not finite" in swaps["refused"]["finite"]
    assert swaps["unchanged"] and swaps["small"]

    assert answers["off"] < CLOSE and answers["greedy_off"] < CLOSE
    assert answers["greedy"] == 3 and answers["again"] and answers["different"] > 40
    assert answers["ends"] == [False, True] and answers["right_ends"]
    assert "lower `rollout.max_new_tokens`" in answers["too_long"] and "no tokens" in answers["no_tokens"]
    assert answers["truncated"].startswith("EngineError") and answers["counted"] == [0, 5]

    if MODELS.get(name, {}).get("tie_word_embeddings", True):
        assert head["said"].startswith("WeightsLost: version 6: TwoMatrices")
        assert head["then"].startswith("NoWeights")
    assert head["mended"]


def test_logprobs_are_those_before_top_k_and_top_p(python: Path, tmp_path: Path) -> None:
    found = told(python, tmp_path, QWEN3, "truncated")
    assert max(found[kind] for kind in ("top_k", "top_p", "greedy")) < CLOSE
    assert "rollout.temperature = 0.8" in found["tempered"]


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "uint16"), ("float16", "float16")])
def test_numbers_of_16_bits_are_read_back_to_the_last_bit(
        python: Path, tmp_path: Path, dtype: str, stored: str) -> None:
    found = told(python, tmp_path, QWEN3, dtype)
    assert found["dtype"] == [stored] and found["digest"] and found["shortest"] >= 1


def test_a_prompt_that_the_cache_has_no_room_for_names_the_cache(python: Path, tmp_path: Path) -> None:
    said = told(python, tmp_path, LONG, "room")["said"]
    assert said.startswith("PromptTooLong") and "rollout.env.VLLM_CPU_KVCACHE_SPACE" in said


@pytest.mark.parametrize(("name", "line"), [
    (SMALL_HEADS, "head_dim=16"), ("gpt2", "for transformer.h.0.attn.c_attn.weight of [64, 192]")],
    ids=["heads of 16", "gpt2"])
def test_a_model_that_vllm_can_not_serve_is_refused_before_it_is_given_weights(
        python: Path, tmp_path: Path, name: str, line: str) -> None:
    done = run(python, tmp_path, name, "swaps")
    last = [text for text in done.stderr.splitlines() if "BadValue" in text][-1]
    assert done.returncode == 1 and "vLLM can not serve" in last and line in last


@pytest.fixture
def job(tmp_path: Path, popen: Any, python: Path) -> Run:
    """The small job, with vLLM in the rollout's place."""
    made = Run(tmp_path, popen)
    text = made.recipe.read_text().replace("hidden=32&", "hidden=64&")
    made.recipe.write_text(text.replace("[rollout]\n", f'[rollout]\nengine = "vllm"\npython = "{python}"\n').replace(
        "eval_every = 0", "eval_every = 3\ndeadline_s = 600.0") + "[weights]\ndeadline_s = 300.0\n"
        "[supervisor]\nstart_s = 600.0\n")
    return made


def end(job: Run, process: subprocess.Popen[Any], trained: int = 6 * 8 * 4) -> None:
    assert process.wait(JOB_S) == 0, job.output.read_text()
    balance = job.balance()
    assert balance["balanced"] and balance["trained"] == trained and balance["in_flight"] == balance["buffered"] == 0


def test_a_job_trains_on_its_answers_and_a_killed_rollout_leaves_nothing_and_comes_back(job: Run) -> None:
    """A rollout that held another digest of any version would have ended the job."""
    process = job.start()
    job.until_step(6)
    rollout = psutil.Process(job.pid("rollout-0"))
    assert rollout.children(recursive=True) == []  # vLLM's engine core would be one
    kill(rollout.pid)
    [restart] = eventually(lambda: job.events("restarting"), "the restart of the rollout", within_s=120)
    assert restart["actor"] == "rollout-0" and restart["reason"] == "killed by SIGKILL"
    end(job, process)
    assert job.processes() == []
    lines = [line for line in job.metrics() if line["phase"] == "grpo"]
    assert [line["step"] for line in lines] == [5, 6, 7, 8, 9, 10]
    assert max(line["logprob/engine_distance_max"] for line in lines) < CLOSE
    started = [event for event in job.events("started") if event["role"] == "rollout"]
    assert all(event["interpreter"].endswith(".venv-vllm/bin/python") for event in started)
