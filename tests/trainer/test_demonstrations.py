"""Demonstrations as they are read for training: what was recorded, and one line for what is damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_actor.actors.errors import UserError
from cosmos_actor.simulator_bridge.recording import RecordOptions, record
from cosmos_actor.trainer.demonstrations import BadDemonstrations, Demonstrations
from tests.simulator_bridge.test_recording import played
from tests.simulator_bridge.worlds import CounterSimulator, PainterSimulator

pq = pytest.importorskip("pyarrow.parquet")
TRIALS = 3
TASKS = {"paint": 0, "never": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TRIALS episodes of `paint`, and as many of `never`."""
    folder, simulator = tmp_path_factory.mktemp("demonstrations") / "d", PainterSimulator()
    record(simulator, simulator.describe(), RecordOptions(folder, TRIALS, tuple(TASKS)), lambda line: None)
    return folder


def truth() -> list[dict[str, Any]]:
    """Each frame with what follows it in its episode, and its task."""
    return [{**frame, "task": index, "follows": [after["action"] for after in frames[at:]]}
            for index in TASKS.values() for trial in range(TRIALS)
            for frames in [played(index, trial)] for at, frame in enumerate(frames)]


@pytest.mark.parametrize("memory_mb", [1, 0])
def test_what_is_read_is_what_was_recorded(whole: Path, memory_mb: int) -> None:
    """Also where the pictures do not fit, and are decoded each time."""
    read, expected = Demonstrations.open(whole, memory_mb=memory_mb), truth()
    assert read.description == PainterSimulator().describe()
    assert (read.tasks, read.episodes, read.frames) == (list(TASKS), 2 * TRIALS, len(expected))
    assert read.statistics["action"]["count"] == [len(expected)]
    chunk = read.chunk(np.arange(read.frames), 4)
    for name, spec in read.description.observations.items():
        assert chunk.observations[name].dtype == spec.dtype
        assert np.array_equal(chunk.observations[name], np.stack([frame[name] for frame in expected])), name
    assert chunk.tasks.tolist() == [frame["task"] for frame in expected]
    assert chunk.actions.shape == (read.frames, 4, 2) and chunk.actions.dtype == np.float32
    for row, frame in enumerate(expected):
        follows = frame["follows"][:4]
        assert chunk.mask[row].tolist() == [True] * len(follows) + [False] * (4 - len(follows))
        assert np.array_equal(chunk.actions[row, :len(follows)], np.stack(follows))
        assert not chunk.actions[row, len(follows):].any()


def test_a_sample_is_the_same_for_the_same_generator(whole: Path) -> None:
    chunks = Demonstrations.open(whole).chunks(2)
    one, other = (chunks.sample(np.random.default_rng(3), 50) for _ in range(2))
    assert np.array_equal(one.actions, other.actions) and np.array_equal(one.mask, other.mask)
    assert all(np.array_equal(one.observations[name], other.observations[name]) for name in one.observations)
    assert one.observations["wrist"].shape == (50, 12, 16, 3)
    assert set(one.tasks.tolist()) == {0, 1}


def test_discrete_actions(tmp_path: Path) -> None:
    simulator = CounterSimulator("counter")
    record(simulator, simulator.describe(), RecordOptions(tmp_path / "d", 2, ["count"]), lambda line: None)
    chunk = Demonstrations.open(tmp_path / "d").chunk(np.array([0, 2, 3]), 3)
    assert chunk.actions.tolist() == [[3, 3, 3], [3, 1, 0], [1, 0, 0]]
    assert chunk.actions.dtype == np.int64


def test_videos(tmp_path: Path) -> None:
    pytest.importorskip("av")
    simulator = PainterSimulator()
    record(simulator, simulator.describe(), RecordOptions(tmp_path / "d", 2, ["paint"], video=True), lambda line: None)
    read = Demonstrations.open(tmp_path / "d")
    seen = read.observations(np.arange(read.frames))["front"]
    expected = np.stack([frame["front"] for trial in range(2) for frame in played(0, trial)])
    assert np.abs(seen.astype(int) - expected).max() <= 4
    with pytest.raises(BadDemonstrations, match="record them without --video"):
        Demonstrations.open(tmp_path / "d", memory_mb=0)


# ---- what is damaged

def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def changed(**values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def without(column: str) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pq.read_table(path).drop_columns([column]), path)


def one_less(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(0, len(table) - 1), path)


def narrower(path: Path) -> None:
    info = json.loads(path.read_text())
    info["cosmos_actor"]["description"]["observations"]["steps"]["shape"] = [3]
    path.write_text(json.dumps(info))


def smaller_pictures(path: Path) -> None:
    info = json.loads(path.read_text())
    info["features"]["observation.images.wrist"]["shape"] = [6, 16, 3]
    info["cosmos_actor"]["description"]["observations"]["wrist"]["shape"] = [6, 16, 3]
    path.write_text(json.dumps(info))


def broken_picture(path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pq.read_table(path)
    at = table.column_names.index("observation.images.wrist")
    rows = table.column(at).to_pylist()
    rows[1]["bytes"] = rows[1]["bytes"][:60]
    pq.write_table(table.set_column(at, table.field(at), pa.array(rows, table.field(at).type)), path)


INFO, DATA = "meta/info.json", "data/chunk-000/file-000.parquet"


@pytest.mark.parametrize(("name", "damage", "said"), [
    (INFO, Path.unlink, "meta/info.json: No such file or directory"),
    (INFO, cut, "meta/info.json: it is not JSON"),
    (INFO, changed(codebase_version="v2.1"), "meta/info.json: version v2.1 of the format, not v3.0"),
    (INFO, changed(cosmos_actor={}), "meta/info.json: KeyError: 'description'"),
    (INFO, changed(total_frames=9), "meta/info.json says 6 of 9"),
    (INFO, narrower, "`observation.state` has [3] numbers a frame"),
    (INFO, smaller_pictures, "`observation.images.wrist` has pictures of [12, 16, 3]"),
    ("meta/stats.json", Path.unlink, "meta/stats.json: No such file"),
    ("meta/episodes/chunk-000/file-000.parquet", cut, "file-000.parquet: it can not be read: "),
    (DATA, Path.unlink, "data: no chunk-000/file-000.parquet is there"),
    (DATA, cut, "data/chunk-000/file-000.parquet: it can not be read: "),
    (DATA, without("action"), f"{DATA}: no column `action`"),
    (DATA, without("observation.images.front"), f"{DATA}: no column `observation.images.front`"),
    (DATA, one_less, "`observation.state` has "),
    (DATA, broken_picture, "`observation.images.wrist` has a picture that can not be read"),
])
def test_damage_is_one_line_that_names_the_file(name: str, damage: Callable[[Path], None], said: str, whole: Path,
                                                tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "d")
    damage(tmp_path / "d" / name)
    with pytest.raises(BadDemonstrations) as error:
        Demonstrations.open(tmp_path / "d")
    assert said in str(error.value)
    assert str(error.value).startswith(f"demonstrations {tmp_path / 'd'}: ") and "\n" not in str(error.value)


def test_a_dataset_of_somebody_else_says_so(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "d")
    info = json.loads((tmp_path / "d" / INFO).read_text())
    del info["cosmos_actor"]
    (tmp_path / "d" / INFO).write_text(json.dumps(info))
    with pytest.raises(BadDemonstrations, match="it was not written by `cosmos-actor sim record`"):
        Demonstrations.open(tmp_path / "d")


def test_without_pyarrow_it_says_what_to_install(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"pip install 'cosmos-actor\[record\]'"):
        Demonstrations.open(whole)
