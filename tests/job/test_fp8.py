"""A job whose rollouts act with rounded weights: they hold what was published, and the mismatch sees what they do."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


def test_rounded_rollouts_hold_what_was_published_and_the_mismatch_tells_them_apart(run) -> None:
    """In float32 an engine that computes with what was sent is 1e-5 nats from the trainer, and the job would end if it
    held another digest than was published."""
    run.finish("--inproc", sets=["rollout.quantization=fp8"])
    trained = [line for line in run.metrics() if "mismatch/k3" in line]
    assert trained and min(line["mismatch/newest_max"] for line in trained) > 1e-4
    taken = run.events("weights_taken")
    assert taken and all(event["digest"] == event["published"] != "" for event in taken)
    assert all(0.005 < event["rounding"]["q_proj/rms"] < 0.05 for event in taken)
    assert run.balance()["balanced"]
