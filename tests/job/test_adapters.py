"""Whole jobs that train an adapter: what rollouts and reference compute with it is what the trainer does."""

from __future__ import annotations

import pytest

from tests.job.runs import Run

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
CORRECTED = ("policy.grpo.old_logprobs=recomputed", "policy.grpo.correction.level=token")


def test_an_adapter_is_trained_by_a_job_and_resumed_to_the_same_losses(run, tmp_path, popen) -> None:
    pytest.importorskip("peft")
    sets = ["policy.lora.rank=4", "policy.optimizer.learning_rate=1e-2", *CORRECTED]
    run.finish("--inproc", sets=sets)
    lines = run.metrics()
    trained = [line for line in lines if "mismatch/k3" in line]
    assert len(trained) == 6 and trained[0]["kl/reference"] == 0.0 and trained[-1]["kl/reference"] > 0.0
    assert max(line["mismatch/max"] for line in trained) < 1e-5
    assert max(line["correction/cut"] for line in trained) == 0.0
    assert run.balance()["balanced"]
    adapters = sorted((run.directory / "checkpoints").glob("iter_*/policy/adapter/adapter_model.safetensors"))
    assert len(adapters) == 2
    halves = Run(tmp_path, popen, "halves")
    halves.finish("--inproc", sets=[*sets, "run.steps=3"])
    halves.finish("--inproc", "--resume", sets=[*sets, "run.steps=6"])
    assert [line["loss/total"] for line in halves.metrics()] == [line["loss/total"] for line in lines]


def test_with_a_learning_rate_of_zero_the_mismatch_of_a_job_stays_flat(run) -> None:
    """Samples of older versions, too: versions come and go, and none of them moves anything."""
    run.finish("--inproc", sets=["policy.optimizer.learning_rate=0.0", "run.steps=12", "run.max_staleness=2"])
    trained = [line for line in run.metrics() if "mismatch/k3" in line]
    assert len(trained) == 12 and max(line["staleness/max"] for line in trained) > 0
    assert max(line["mismatch/max"] for line in trained) < 1e-6
    assert max(line["mismatch/k3"] for line in trained) < 1e-12
    assert max(line["ratio/distance_max"] for line in trained) < 1e-6
