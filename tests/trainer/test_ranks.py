"""Two ranks under torch's own launcher give what one rank gives: losses, weights, log-probs, resume."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.trainer.ranks import join_world
from tests.trainer import ranked
from tests.trainer.make import make_settings


def arrays(directory: Path, name: str) -> dict[str, np.ndarray]:
    with np.load(directory / f"{name}.npz") as file:
        return dict(file)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [
    "whole", pytest.param("adapter", marks=pytest.mark.heavy), pytest.param("merged", marks=pytest.mark.heavy)])
def test_two_ranks_equal_one(tmp_path: Path, popen, kind: str) -> None:
    if kind != "whole":
        pytest.importorskip("peft")
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=2",
               "-m", "tests.trainer.ranked", "2", str(two), kind]
    process = popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "USE_LIBUV": "0"})
    ranked.main(1, one, kind)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    rtol = 1e-5 if kind == "whole" else 1e-4  # the gradient of an adapter's A passes through its B, which began at zero
    np.testing.assert_allclose(arrays(two, "losses")["arr_0"], arrays(one, "losses")["arr_0"], atol=1e-6, rtol=rtol)
    for name in ("weights", "logprobs"):
        ours, theirs = arrays(one, name), arrays(two, name)
        assert list(ours) == list(theirs)
        for key in ours:
            np.testing.assert_allclose(theirs[key], ours[key], atol=2e-5, err_msg=key)


def test_another_number_of_ranks_than_the_launchers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(BadValue, match=r"started 3 ranks.*policy\.ranks"):
        join_world(make_settings(ranks=2))
