"""What `sim record` writes, and what it leaves when it can not."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_actor.simulator_bridge.cli import main
from cosmos_actor.simulator_bridge.contract import Simulator
from cosmos_actor.simulator_bridge.mistakes import Mistake
from cosmos_actor.simulator_bridge.mp4 import read_mp4
from cosmos_actor.simulator_bridge.recording import Recorded, RecordOptions, record, unit_of
from cosmos_actor.simulator_bridge.telling import description_of, plain
from tests.simulator_bridge.worlds import CounterSimulator, Painter, PainterSimulator

pq = pytest.importorskip("pyarrow.parquet")
ROOT = Path(__file__).parents[2]
PAINTER = "python:tests.simulator_bridge.worlds:painter"
WITHIN_S = 60.0


def recorded(folder: Path, simulator: Simulator | None = None, **options: Any) -> Recorded:
    simulator = simulator or PainterSimulator()
    return record(simulator, simulator.describe(), RecordOptions(folder, **options), lambda line: None)


def info_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "meta" / "info.json").read_text(encoding="utf-8")))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(folder / "data/chunk-000/file-000.parquet").to_pylist())


def played(task: int, trial: int) -> list[dict[str, Any]]:
    """What the worlds show when the expert acts in them: the truth that a dataset is held against."""
    description = PainterSimulator().describe()
    world, frames, over = Painter(), [], False
    unit = unit_of(description.tasks[task], trial, 0)
    world.reset(unit)
    while not over and len(frames) < unit.max_steps:
        action = np.clip(world.expert(), -1, 1)
        frames.append({**world.observe(), "action": action})
        frames[-1]["reward"], over, _ = world.step(action)
    return frames


# ---- what is in it

def test_every_frame_is_what_the_simulator_showed(tmp_path: Path) -> None:
    from PIL import Image

    assert recorded(tmp_path / "d", episodes=3, tasks=["paint"])[:4] == (3, 3, 0, 3)
    rows = rows_of(tmp_path / "d")
    truth = [(episode, index, frame) for episode in range(3) for index, frame in enumerate(played(0, episode))]
    assert len(rows) == len(truth)
    for number, (row, (episode, index, frame)) in enumerate(zip(rows, truth)):
        for name in ("front", "wrist"):
            picture = Image.open(io.BytesIO(row["observation.images." + name]["bytes"]))
            assert np.array_equal(np.asarray(picture), frame[name])
        assert row["observation.state"] == [float(frame["at"][0, 0]), *frame["steps"].tolist()]
        assert row["action"] == frame["action"].tolist()
        assert row["next.reward"] == pytest.approx(frame["reward"])
        assert (row["episode_index"], row["frame_index"], row["index"]) == (episode, index, number)
        assert row["timestamp"] == pytest.approx(index / 20)
    last = [row["next.done"] for row in rows]
    assert [row["next.success"] for row in rows] == last  # it succeeds where it ends
    assert sum(last) == 3


def test_its_meta_says_what_is_in_it(tmp_path: Path) -> None:
    recorded(tmp_path / "d", episodes=2, tasks=["never", "paint"], seed=5)
    info, description = info_of(tmp_path / "d"), PainterSimulator().describe()
    assert (info["codebase_version"], info["total_episodes"], info["fps"]) == ("v3.0", 4, 20)
    assert info["total_frames"] == len(rows_of(tmp_path / "d"))
    assert info["features"]["observation.state"]["names"] == ["at", "steps.0", "steps.1"]
    told = info["cosmos_actor"]
    assert description_of(told["description"]) == description
    assert (told["tasks"], told["seed"]) == (["paint", "never"], 5)
    tasks = pq.read_table(tmp_path / "d/meta/tasks.parquet").to_pydict()
    assert tasks == {"task_index": [0, 1], "__index_level_0__": ["go to the middle", "never"]}
    episodes = pq.read_table(tmp_path / "d/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [episode["tasks"] for episode in episodes] == [["go to the middle"]] * 2 + [["never"]] * 2
    assert [episode["dataset_from_index"] for episode in episodes[1:]] == [
        episode["dataset_to_index"] for episode in episodes[:-1]]


def test_statistics_are_those_of_all_frames(tmp_path: Path) -> None:
    recorded(tmp_path / "d", episodes=4, tasks=["paint"])
    told = json.loads((tmp_path / "d/meta/stats.json").read_text())
    frames = [frame for trial in range(4) for frame in played(0, trial)]
    actions = np.stack([frame["action"] for frame in frames]).astype(np.float64)
    pixels = np.stack([frame["wrist"] for frame in frames]).reshape(-1, 3) / 255
    for name, (expected, picture) in {
            "mean": (actions.mean(0), pixels.mean(0)), "std": (actions.std(0), pixels.std(0)),
            "min": (actions.min(0), pixels.min(0)), "max": (actions.max(0), pixels.max(0))}.items():
        assert np.allclose(told["action"][name], expected)
        assert np.allclose(np.array(told["observation.images.wrist"][name]), picture.reshape(3, 1, 1))
    assert told["action"]["count"] == told["observation.images.wrist"]["count"] == [len(frames)]
    median = np.array(told["observation.images.wrist"]["q50"]).reshape(3)
    assert np.allclose(median, np.median(pixels, 0), atol=1 / 255)


def test_noise_moves_what_is_done_and_not_what_is_written(tmp_path: Path) -> None:
    recorded(tmp_path / "d", episodes=3, tasks=["paint"], noise=0.3)
    rows = rows_of(tmp_path / "d")
    told = [min(1.0, max(-1.0, -2 * row["observation.state"][0])) for row in rows]
    assert [row["action"][0] for row in rows] == pytest.approx(told, abs=1e-6)
    moved = [after["observation.state"][0] - row["observation.state"][0] - 0.5 * row["action"][0]
             for row, after in zip(rows, rows[1:]) if after["episode_index"] == row["episode_index"]]
    assert max(map(abs, moved)) > 0.01


def test_the_same_again_gives_the_same(tmp_path: Path) -> None:
    for name in ("one", "other"):
        recorded(tmp_path / name, episodes=3, tasks=["paint", "never"], noise=0.1)
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "other")
    recorded(tmp_path / "third", episodes=3, tasks=["paint", "never"], noise=0.1, seed=1)
    assert rows_of(tmp_path / "one") != rows_of(tmp_path / "third")


def test_initial_states_come_in_turn() -> None:
    task = PainterSimulator().describe().tasks[1]
    assert [unit_of(task, trial, 0).initial_state for trial in range(7)] == [0, 1, 2, 3, 4, 0, 1]


def test_failures_can_be_left_out(tmp_path: Path) -> None:
    done = recorded(tmp_path / "d", episodes=5, tasks=["never"], only_success=True)
    assert (done.tried, done.succeeded, done.written) == (5, 1, 1)  # it begins where it is to be
    assert info_of(tmp_path / "d")["total_episodes"] == 1


def test_discrete_actions_without_pictures(tmp_path: Path) -> None:
    recorded(tmp_path / "d", CounterSimulator("counter"), episodes=2, tasks=["count"])
    assert [row["action"] for row in rows_of(tmp_path / "d")] == [3, 3, 3, 1] * 2
    assert info_of(tmp_path / "d")["fps"] == 10


def test_pictures_as_videos(tmp_path: Path) -> None:
    pytest.importorskip("av")
    recorded(tmp_path / "d", episodes=2, tasks=["paint"], video=True)
    for trial in range(2):
        frames = list(read_mp4(tmp_path / f"d/videos/observation.images.front/chunk-000/file-00{trial}.mp4"))
        truth = [frame["front"] for frame in played(0, trial)]
        assert len(frames) == len(truth)
        assert np.abs(np.stack(frames).astype(int) - np.stack(truth)).max() <= 4
    assert "observation.images.front" not in rows_of(tmp_path / "d")[0]


# ---- what it leaves

@pytest.mark.parametrize(("options", "said"), [
    ({"tasks": ["sing"]}, "--task sing: painter has paint, never, breaks"),
    ({"tasks": ["breaks"]}, "5 errors in a row; the last one: painter, task breaks: the expert raised RuntimeErr"),
    ({"tasks": ["never"], "episodes": 1, "only_success": True}, "1 tried, 0 succeeded, 0 errors (--only-success)"),
])
def test_what_can_not_be_recorded_leaves_nothing(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(Mistake) as mistake:
        recorded(tmp_path / "d", **options)
    assert said in str(mistake.value)
    assert not list(tmp_path.iterdir())


def test_who_has_no_expert_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    class Silent(PainterSimulator):
        def describe(self) -> Any:
            import dataclasses

            return dataclasses.replace(super().describe(), expert=False)

        def open(self, envs: int) -> Any:
            raise AssertionError("built")

    with pytest.raises(Mistake, match="painter: this simulator has no scripted expert"):
        recorded(tmp_path / "d", Silent())


def test_noise_in_discrete_actions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="--noise 0.5: the actions of counter are discrete"):
        recorded(tmp_path / "d", CounterSimulator("counter"), noise=0.5)


def test_a_folder_that_is_there_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine").write_text("precious")
    with pytest.raises(Mistake, match="it exists"):
        recorded(tmp_path / "d", episodes=1)
    assert [path.name for path in tmp_path.rglob("*")] == ["d", "mine"]


def test_a_picture_of_odd_size_is_no_video(tmp_path: Path) -> None:
    pytest.importorskip("av")

    class Odd(PainterSimulator):
        def describe(self) -> Any:
            import dataclasses

            from cosmos_actor.simulator_bridge.contract import ArraySpec

            return dataclasses.replace(super().describe(), observations={"wrist": ArraySpec("uint8", (7, 16, 3))})

    with pytest.raises(Mistake, match="--video: `wrist` is 7 x 16, and H.264 has even sizes only"):
        recorded(tmp_path / "d", Odd(), video=True)


SLOW = """
import time
from tests.simulator_bridge.worlds import Painter, PainterSimulator
from cosmos_actor.simulator_bridge.slots import EachSlot

class Slow(Painter):
    def step(self, action):
        time.sleep(0.05)
        return super().step(action)

class Simulator(PainterSimulator):
    def open(self, envs):
        return EachSlot(Slow, envs)
make = Simulator
"""


def started(folder: Path) -> subprocess.Popen[str]:
    (folder / "slow.py").write_text(SLOW)
    return subprocess.Popen(
        [sys.executable, "-m", "cosmos_actor.cli", "sim", "record", "python:slow:make", "--out", str(folder / "d")],
        cwd=str(folder), env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def writing(process: subprocess.Popen[str], folder: Path) -> None:
    """Until something of it is on the disk."""
    deadline = time.monotonic() + WITHIN_S
    while not list(folder.glob(".d.part/data/*/*")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


def test_a_kill_in_the_middle_leaves_no_half_dataset(tmp_path: Path) -> None:
    process = started(tmp_path)
    try:
        writing(process, tmp_path)
        with pytest.raises(Mistake, match="another process records it"):
            recorded(tmp_path / "d", episodes=1)
    finally:
        process.kill()
        process.communicate()
    assert not (tmp_path / "d").exists()
    recorded(tmp_path / "d", episodes=1, tasks=["paint"])  # what is left does not stand in the way
    assert info_of(tmp_path / "d")["total_episodes"] == 1
    assert not (tmp_path / ".d.part").exists()


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    process = started(tmp_path)
    try:
        writing(process, tmp_path)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=WITHIN_S)[1]
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, errors) == (130, "stopped: nothing is written\n")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["slow.py"]


# ---- the command

def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["sim", "record", PAINTER, "--out", str(tmp_path / "d"), "--episodes", "2", "--task", "paint"]
    assert main(words) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("paint: 2 of 2 succeeded, 2 written, ")
    assert lines[1].startswith(str(tmp_path / "d") + ": 2 episodes, ")
    assert main(words) == 2
    assert capfd.readouterr().err == "error: --out {}: it exists; name a folder that does not\n".format(tmp_path / "d")


def test_its_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "record", PAINTER, "--out", str(tmp_path / "d"), "--episodes", "1", "--task", "never",
                 "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["tried"], told["succeeded"], told["written"]) == (1, 0, 1)


@pytest.mark.parametrize(("flag", "said"), [
    (["--episodes", "0"], "--episodes 0: expected 1 or more"), (["--noise", "-1"], "--noise -1.0: expected 0 or more"),
    (["--noise", "nan"], "--noise nan: expected 0 or more"),
])
def test_numbers_that_make_no_sense(flag: list[str], said: str, tmp_path: Path,
                                    capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "record", PAINTER, "--out", str(tmp_path / "d"), *flag]) == 2
    assert capfd.readouterr().err == "error: {}\n".format(said)


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Mistake, match=r"pip install 'cosmos-actor\[record\]'"):
        recorded(tmp_path / "d")
    assert not list(tmp_path.iterdir())


def test_a_description_can_be_read_back() -> None:
    description = PainterSimulator().describe()
    assert description_of(json.loads(json.dumps(plain(description, None)))) == description


# ---- several at once

def test_workers_record_the_same_as_one(tmp_path: Path) -> None:
    for workers in (1, 3):
        arguments = ["sim", "record", PAINTER, "--out", str(tmp_path / str(workers)), "--episodes", "4",
                     "--noise", "0.1", "--task", "paint", "--task", "never", "--workers", str(workers)]
        assert main(arguments) == 0
    assert rows_of(tmp_path / "1") == rows_of(tmp_path / "3")


def test_a_worker_that_dies_is_one_line_and_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["sim", "record", "python:tests.simulator_bridge.worlds:painter_that_exits", "--out",
                 str(tmp_path / "demos"), "--workers", "2"]
    assert main(arguments) == 2
    assert "ended by itself" in capfd.readouterr().err and not any(tmp_path.iterdir())


def test_less_than_one_worker_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "record", PAINTER, "--out", str(tmp_path / "demos"), "--workers", "0"]) == 2
    assert "--workers 0: expected 1 or more" in capfd.readouterr().err
