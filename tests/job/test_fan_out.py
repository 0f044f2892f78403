"""A real job whose rollouts are on two other hosts: they pass its weights on to each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.job.runs import START_S, Run, environment
from tests.job.test_whole_job import join_command
from tests.netns import skip_reason
from tests.star import star

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.netns,
              pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))]


def test_the_policy_sends_each_version_once_and_the_losses_are_the_same(tmp_path: Path, uninterrupted: Run):
    with star(["head", "a", "b"]) as hosts:
        run = Run(tmp_path, hosts["head"].popen)
        process = run.start(sets=["rollout.count=0", "rollout.min_actors=2", f'bus.host="{hosts["head"].address}"',
                                  "rollout.chunk_prompts=4"])
        joined = [hosts[name].popen(join_command(run), env=environment()) for name in "ab"]
        run.wait(process)
        assert [other.wait(START_S) for other in joined] == [0, 0]
    assert run.losses() == uninterrupted.losses()
    found = run.metrics()[-1]
    taken = [found[f"fan_out/{source}_bytes"] for source in ("publisher", "relay")]
    assert 0 < 0.5 * taken[0] <= taken[1] <= 1.5 * taken[0], "one took it from the policy; a version may be under way"
    assert not [name for name in found if name.startswith("fan_out/") and not name.endswith("_bytes")]
