"""A real job in which a byte of a version falls over in the policy's shared memory, and what its engines hold."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.cli.app import run as command
from tests.job.runs import Run
from tests.waiting import eventually, stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DAMAGED = 7
FROZEN = 4
DAMAGE = f"""
import sys

if any("policy-0" in word for word in sys.argv) or "--actor" in " ".join(sys.orig_argv):
    from cosmos_actor.weight_plane.publisher import WeightPublisher

    publish = WeightPublisher.publish

    def and_damage(self, version, tensors, *arguments, **options):
        manifest = publish(self, version, tensors, *arguments, **options)
        if version.step == {DAMAGED} or self._keep == 1:
            entry = manifest.tensors[-1]
            with self._store.reading(manifest.buckets[entry.bucket].generation) as block:
                block[entry.offset] ^= 1
        return manifest

    WeightPublisher.publish = and_damage
"""
"""Of the process of the policy, when Python starts: one bit of one version and of the frozen reference, once
they can be pulled."""


@pytest.fixture
def damage(tmp_path: Path) -> str:
    """The setting that has it in the policy."""
    folder = tmp_path / "damage"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(DAMAGE)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return f'policy.env={{PYTHONPATH = "{path}"}}'


def test_one_flipped_bit_is_an_alarm_is_put_right_and_changes_no_loss(run: Run, uninterrupted: Run, damage: str):
    run.finish(sets=[damage])
    alarms, mended = run.events("weights_alarm"), run.events("weights_mended")
    assert {(alarm["rollout"], alarm["step"], alarm["frozen"]) for alarm in alarms} == {
        ("reference-0", FROZEN, True), ("rollout-0", DAMAGED, False)}
    assert [(event["step"], event["tensors"], event["count"]) for event in mended] == [
        (FROZEN, [alarms[0]["tensor"]], 1), (DAMAGED, [alarms[-1]["tensor"]], 1)]
    assert run.metrics()[-1]["weights/alarms"] == len(alarms)
    assert f"rollout-0: weights {DAMAGED} came damaged, it goes on with those before" in run.output.read_text()
    assert "reference-0: the frozen reference came damaged, it fetches them again" in run.output.read_text()
    assert run.losses() == uninterrupted.losses() and run.balance() == uninterrupted.balance()


def test_what_every_engine_of_a_running_job_holds_is_proved(run: Run, capfd: Any):
    def verify(*options: str) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        code = command(["weights", "verify", str(run.directory), "--json", *options])
        return code, json.loads(capfd.readouterr().out)

    def held_by_status() -> dict[str, Any] | None:
        command(["status", str(run.directory), "--json"])
        state = json.loads(capfd.readouterr().out)
        found = {actor["actor"]: actor["weights"] for actor in state["actors"] if actor["weights"]}
        same = set(found) == {"policy-0", "rollout-0", "rollout-1"} and all(
            weights["as_published"] for weights in found.values())
        return found if same and state["published"]["digest"] == found["policy-0"]["digest"] else None

    process = run.start(sets=["run.steps=2000", "rollout.count=2"])
    run.until_step(5)
    code, found = eventually(lambda: answer if (answer := verify())[0] == 0 else None, "all equal", within_s=60.0)
    assert [row["actor"] for row in found["actors"]] == ["policy-0", "rollout-0", "rollout-1"]
    assert len({(row["version"], row["digest"]) for row in found["actors"]}) == 1
    held = eventually(held_by_status, "status says what each holds", within_s=60.0)
    assert all(len(weights["digest"]) == 64 and weights["since"] > 0 for weights in held.values())
    pid = run.pid("rollout-1")
    stop(pid)
    try:
        code, found = verify("--deadline", "2")
        [silent] = [row for row in found["actors"] if row["actor"] == "rollout-1"]
        assert code == 1 and not silent["equal"]
        assert "did not answer within 2 s" in silent["why"] or "can not be reached" in silent["why"]
    finally:
        os.kill(pid, signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    run.wait(process)
