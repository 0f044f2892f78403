"""What `sim record` writes is read by `lerobot` itself, frame by frame the same."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_actor.simulator_bridge.recording import RecordOptions, record
from tests.project.conftest import clean_environment, run
from tests.simulator_bridge.test_recording import played
from tests.simulator_bridge.worlds import PainterSimulator

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(2400), pytest.mark.components]
PROGRAM = Path(__file__).parent / "programs" / "read_lerobot.py"
LEROBOT = "lerobot==0.4.4"
ALONE = (LEROBOT, "torchvision==0.28.0", "torchcodec==0.13.0", "accelerate==1.15.0", "draccus==0.10.0")
"""Installed without what they ask for: they ask for a torch of their own, with CUDA."""
WITH = ("datasets>=4,<5", "huggingface-hub>=0.34.2,<0.36", "av>=15,<16", "jsonlines", "einops")
TRIALS = 3


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python of an environment with lerobot in it, and below that everything that is here."""
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("lerobot")
    run([sys.executable, "-m", "venv", folder / "venv"], cwd=folder, timeout=100)
    python = folder / "venv" / "bin" / "python"
    site = folder / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run([*install, *WITH], cwd=folder, timeout=900)
    run([*install, "--no-deps", *ALONE], cwd=folder, timeout=900)
    return python


def read(python: Path, folder: Path, *words: str) -> Mapping[str, Any]:
    environment = {**clean_environment(), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder.parent / "hf"),
                   "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(python), str(PROGRAM), str(folder), str(folder.parent / "read.npz"), *words],
                          env=environment, capture_output=True, text=True, timeout=300)
    if "Could not load libtorchcodec" in done.stderr:
        pytest.skip("torchcodec, with which lerobot decodes videos, finds no FFmpeg here")
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder.parent / "read.npz"))


def recorded(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """What is in it, frame by frame."""
    simulator = PainterSimulator()
    record(simulator, simulator.describe(), RecordOptions(folder, TRIALS, ["paint", "never"], **options),
           lambda line: None)
    return [{**frame, "task_index": task, "frame_index": at, "episode_index": TRIALS * task + trial}
            for task in (0, 1) for trial in range(TRIALS) for at, frame in enumerate(played(task, trial))]


def test_lerobot_reads_every_frame_as_it_was(lerobot: Path, tmp_path: Path) -> None:
    frames = recorded(tmp_path / "d")
    got = read(lerobot, tmp_path / "d", "chunks")
    assert (got["fps"], got["episodes"]) == (20, 2 * TRIALS)
    for name in ("front", "wrist"):
        pictures = np.rint(got[f"observation.images.{name}"] * 255).astype(np.uint8).transpose(0, 2, 3, 1)
        assert np.array_equal(pictures, np.stack([frame[name] for frame in frames]))
    states = np.stack([np.concatenate([frame["at"].reshape(-1), frame["steps"]]) for frame in frames])
    assert np.array_equal(got["observation.state"], states.astype(np.float32))
    assert np.array_equal(got["action"][:, 0], np.stack([frame["action"] for frame in frames]))
    last = np.array([after["frame_index"] == 0 for after in [*frames[1:], {"frame_index": 0}]])
    assert np.array_equal(got["action_is_pad"], np.stack([np.zeros(len(frames), bool), last], axis=1))
    assert np.array_equal(got["next.done"], last)
    assert np.allclose(got["next.reward"], [frame["reward"] for frame in frames])
    for name in ("task_index", "frame_index", "episode_index"):
        assert np.array_equal(got[name], [frame[name] for frame in frames])
    assert got["task"].tolist() == [["go to the middle", "never"][frame["task_index"]] for frame in frames]
    assert np.allclose(got["stats/action/mean"], np.mean([frame["action"] for frame in frames], axis=0))
    assert got["stats/observation.images.wrist/mean"].shape == (3, 1, 1)


def test_lerobot_reads_videos_too(lerobot: Path, tmp_path: Path) -> None:
    frames = recorded(tmp_path / "d", video=True)
    got = read(lerobot, tmp_path / "d")
    pictures = np.rint(got["observation.images.front"] * 255).astype(int).transpose(0, 2, 3, 1)
    assert np.abs(pictures - np.stack([frame["front"] for frame in frames])).max() <= 4
