"""A real job whose versions go from the policy's device to the rollout's: the same losses, and every swap proved.

Without a GPU both are made to take a CPU for one: all else is as it is there, mapped memory in the place of CUDA IPC.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.job.runs import Run, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
AS_IF = """
import sys

def is_actor(name):
    return any(name in word for word in sys.argv) or "--actor" in " ".join(sys.orig_argv)

if is_actor("policy-0"):
    from cosmos_actor.roles.policy import PolicyRole

    PolicyRole.always_from_device = True
if is_actor("rollout-0"):
    from cosmos_actor.weight_plane.transports.reader import TransportReader

    def to_device(self, ref):
        if "?device=" not in ref.address:
            return None
        if not hasattr(self, "mapped"):
            from cosmos_actor.weight_plane.transports.mapped import MappedTransport

            self.mapped = MappedTransport(self._bulk.settings, "cpu")
            self._say("weights come out of mapped memory")
        return self.mapped

    TransportReader.to_device = to_device
"""
"""Of every process of the two roles, when Python starts."""


@pytest.fixture
def as_if(tmp_path: Path) -> list[str]:
    """The settings that have it there."""
    folder = tmp_path / "as_if"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(AS_IF)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return [f'{role}.env={{PYTHONPATH = "{path}"}}' for role in ("policy", "rollout")]


def logs(run: Run) -> str:
    return "".join(path.read_text() for path in run.directory.rglob("*.log"))


def test_a_job_whose_versions_stay_on_the_device_trains_as_one_that_brings_them_to_the_host(
        run: Run, uninterrupted: Run, as_if: list[str]):
    run.finish(sets=as_if)
    assert "weights come out of mapped memory" in logs(run)
    assert run.losses() == uninterrupted.losses() and run.balance() == uninterrupted.balance()
    assert all(event["digest"] == event["published"] for event in run.events("weights_taken"))


@pytest.mark.parametrize("actor", ["policy-0", "rollout-0"])
def test_either_end_that_is_killed_comes_back_and_the_job_ends_as_if_nothing_had_happened(
        run: Run, uninterrupted: Run, as_if: list[str], actor: str):
    process = run.start(sets=as_if)
    run.until_step(6)
    kill(run.pid(actor))
    run.wait(process)
    assert [event["actor"] for event in run.events("restarting")] == [actor]
    assert run.losses() == uninterrupted.losses()


@pytest.mark.gpu
@pytest.mark.parametrize(("placement", "way"), [("colocated", "cuda_ipc"), ("disaggregated", "nccl")])
def test_a_job_on_gpus_takes_its_versions_from_gpu_to_gpu(run: Run, placement: str, way: str):
    torch = pytest.importorskip("torch")
    if placement == "disaggregated" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run.finish(sets=["policy.device=cuda", "rollout.device=cuda", "reference.device=cpu", f"run.placement={placement}",
                     "run.colocated_offload=false"])
    told = logs(run)
    assert "weights are published from the GPU: every rollout is on this host" in told
    assert f"weights come by {way}: " in told
    taken = run.events("weights_taken")
    assert taken and all(event["digest"] == event["published"] for event in taken)
