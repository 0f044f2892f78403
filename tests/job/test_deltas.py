"""A real job whose rollouts take what changed: every swap is proved by digest, so a wrong one would end it."""

from __future__ import annotations

import pytest

from tests.job.runs import Run

pytest.importorskip("zstandard")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SLOWLY = ["policy.publish_dtype=bfloat16", "policy.optimizer.learning_rate=1e-6", "policy.sft.learning_rate=1e-6"]


def test_rollouts_of_a_job_take_what_changed(run: Run):
    run.finish(sets=["weights.delta=always", *SLOWLY])
    steps = run.metrics()
    assert 0 < steps[-1]["weights/delta_bytes"] < 0.1 * steps[-1]["weights/bytes"]
    told = "".join(path.read_text() for path in run.directory.rglob("*.log"))
    assert "come as what changed: weights.delta = always" in told


def test_on_one_host_they_come_whole_by_themselves_and_it_is_said_why(run: Run):
    run.finish(sets=SLOWLY)
    assert run.metrics()[-1]["weights/delta_bytes"] == 0
    told = "".join(path.read_text() for path in run.directory.rglob("*.log"))
    assert "come whole: it lies on this host, where a copy is faster" in told
