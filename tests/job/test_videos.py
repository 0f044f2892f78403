"""Where the videos of an evaluation are kept, how long, and what a disk that refuses costs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.job.simulators import Simulators
from cosmos_actor.job.videos import video_name


def record(unit: str, success: int = 1) -> dict[str, Any]:
    return {"unit": unit, "success": success}


def kept(folder: Path, records: list[dict[str, Any]], told: list[dict[str, Any]] | None = None, *, step: int = 5,
         keep: int = 10) -> dict[str, Any]:
    job = SimpleNamespace(paths=RunPaths(folder), settings=SimpleNamespace(sim=SimpleNamespace(keep_videos=keep)),
                          tell=lambda event, **facts: (told if told is not None else []).append({event: facts}))
    videos = {one["unit"]: np.frombuffer(one["unit"].encode(), np.uint8) for one in records}
    return Simulators._keep_videos(SimpleNamespace(_job=job), step, records, videos)  # type: ignore[arg-type]


def there(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder / "videos")) for path in (folder / "videos").rglob("*") if path.is_file())


@pytest.mark.parametrize(("unit", "success", "name"), [
    ("reach/7", 1, "reach-trial-007-success.mp4"), ("reach/1234", 0, "reach-trial-1234-failure.mp4"),
    ("gymnasium:a/b c?d=ü/0", -1, "gymnasium_a_b_c_d_-trial-000-ended.mp4"),
    ("x" * 300 + "/1", 1, "x" * 120 + "-trial-001-success.mp4")])
def test_names(unit: str, success: int, name: str) -> None:
    assert video_name(record(unit, success)) == name


def test_each_has_a_file_of_its_own_also_where_names_fall_together(tmp_path: Path) -> None:
    found = kept(tmp_path, [record("a b/0"), record("a:b/0")])
    assert [(tmp_path / found[unit]["video"]).read_text() for unit in ("a b/0", "a:b/0")] == ["a b/0", "a:b/0"]


def test_an_evaluation_that_is_done_again_replaces_what_it_left(tmp_path: Path) -> None:
    kept(tmp_path, [record("reach/0", 0), record("reach/1")])
    kept(tmp_path, [record("reach/0", 1)])
    assert [path.name for path in (tmp_path / "videos" / "step_000005").iterdir()] == ["reach-trial-000-success.mp4"]


def test_the_newest_evaluations_are_kept_and_nothing_else_is_removed(tmp_path: Path) -> None:
    folder = "step_{:06d}/reach-trial-000-success.mp4"
    kept(tmp_path, [record("reach/0")], step=1000000)
    for name in ("step_000001/mine.mp4", "step_best/reach-trial-000-success.mp4", "step_01/a-trial-000-success.mp4"):
        (tmp_path / "videos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "videos" / name).write_text("")
    others = there(tmp_path)
    for step in (1, 2, 3, 10):  # before the run went back it had come to step 1000000
        kept(tmp_path, [record("reach/0")], step=step, keep=2)
    assert there(tmp_path) == sorted([*others, folder.format(3), folder.format(10)])
    assert not (tmp_path / "videos" / "step_000002").exists()
    for step in (1000001, 1000002):
        kept(tmp_path, [record("reach/0")], step=step, keep=2)
    assert [name for name in there(tmp_path) if name not in others] == [
        folder.format(1000001), folder.format(1000002)]
    assert not (tmp_path / "videos" / "step_1000000").exists()


def test_an_evaluation_without_videos_removes_none_and_0_keeps_all(tmp_path: Path) -> None:
    for step in range(4):
        kept(tmp_path, [record("reach/0")], step=step, keep=0)
    for step in range(4, 8):
        kept(tmp_path, [], step=step, keep=4)
    assert len(there(tmp_path)) == 4


def test_what_a_person_put_beside_them_survives_an_evaluation_that_is_done_again(tmp_path: Path) -> None:
    kept(tmp_path, [record("reach/0")])
    (tmp_path / "videos" / "step_000005" / "notes.txt").write_text("it drops the cup")
    kept(tmp_path, [record("reach/1")])
    assert there(tmp_path) == ["step_000005/notes.txt", "step_000005/reach-trial-001-success.mp4"]


def test_a_disk_that_refuses_is_an_event_and_the_evaluation_goes_on(tmp_path: Path) -> None:
    (tmp_path / "videos").write_text("in the way")
    told: list[dict[str, Any]] = []
    assert kept(tmp_path, [record("reach/0"), record("reach/1")], told) == {}
    [event] = told
    assert event["simulator_not_filmed"]["text"].startswith("videos can not be written: ")
