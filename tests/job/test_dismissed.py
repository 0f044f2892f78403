"""A rollout that joined and can not take weights loses its place; the job goes on without it."""

from __future__ import annotations

import pytest

from tests.job.runs import COMMAND, START_S, Run, environment
from tests.project.source import ROOT
from tests.waiting import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
SPOILT = """
import sys
if "cosmos_actor.cli" in sys.orig_argv:
    from cosmos_actor.weight_plane.errors import WeightsCorrupt
    from cosmos_actor.weight_plane.subscriber import WeightSubscriber
    async def pull(self, manifest, deadline_s):
        {}
    WeightSubscriber.pull = pull
"""


@pytest.mark.parametrize(("spoilt", "reason"), [
    ("raise WeightsCorrupt('head', 'its bytes are not those of the manifest')", "WeightsCorrupt: tensor head"),
    ("import asyncio; await asyncio.sleep(3600)", "waited 10 s for newer weights, holds none"),
], ids=["what it pulls is damaged", "its pull never ends"])
def test_a_joined_rollout_that_can_not_take_weights_only_loses_its_place(run: Run, popen, tmp_path, spoilt, reason):
    (tmp_path / "sitecustomize.py").write_text(SPOILT.format(spoilt))
    process = run.start(sets=["run.steps=2000", "rollout.chunk_prompts=2", "weights.deadline_s=10"])
    run.until_step(5)
    joined = popen([*COMMAND, "start", "--role", "rollout", "--connect", run.head(), "--name", "rollout-elsewhere",
                    "--key", str(run.directory / "keys" / "rollout.key")],
                   env={**environment(), "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    [event] = eventually(lambda: run.events("dismissed"), "the dismissal", within_s=START_S)
    assert event["actor"] == "rollout-elsewhere" and reason in event["reason"]
    assert joined.wait(START_S) == 0
    run.stop_with_all_trained(process)
    assert run.events("rewind") == []
