"""Films of evaluations: which trials, which frames, and that nothing waits for them or fails by them."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_actor.roles import films as films_module
from cosmos_actor.roles.films import Films, cameras_of, missing, side_by_side
from cosmos_actor.simulator_bridge.contract import FAILURE, SUCCESS, UNKNOWN, ArraySpec, WorkUnit
from cosmos_actor.simulator_bridge.mp4 import Mp4, read_mp4
from tests.roles.yard import DESCRIPTION

av = pytest.importorskip("av")
HZ = 20.0
SEEN = dataclasses.replace(DESCRIPTION, control_hz=HZ, observations={
    "state": ArraySpec("float32", (2,)), "front": ArraySpec("uint8", (160, 200, 3)),
    "wrist": ArraySpec("uint8", (80, 100, 3))})


def unit(trial: int, task: str = "count") -> WorkUnit:
    return WorkUnit(f"{task}/{trial}", task, seed=trial)


def observation(grey: int) -> dict[str, np.ndarray]:
    return {name: np.full(spec.shape, grey if spec.dtype == "uint8" else 0, spec.dtype)
            for name, spec in SEEN.observations.items()}


def play(films: Films, one: WorkUnit, success: int, steps: int = 3) -> None:
    films.begin(one)
    for step in range(steps + 1):
        films.add(one, observation(40 * step), step)
    films.ended(one, success)


def frames_of(video: bytes, folder: Path) -> list[np.ndarray]:
    (folder / "film.mp4").write_bytes(video)
    return list(read_mp4(folder / "film.mp4"))


def test_the_first_trials_and_some_failures_of_each_task_are_kept() -> None:
    films = Films(SEEN, videos=2, failed=2)
    for task in ("count", "other"):
        for trial, success in enumerate([SUCCESS, FAILURE, SUCCESS, FAILURE, UNKNOWN, FAILURE, FAILURE]):
            play(films, unit(trial, task), success)
    kept = {f"{task}/{trial}" for task in ("count", "other") for trial in (0, 1, 3, 5)}
    assert set(films.finish()) == kept
    assert films.problem == ""


def test_a_video_shows_what_was_seen_when_it_was_seen(tmp_path: Path) -> None:
    films = Films(SEEN, videos=1, failed=0)
    films.begin(unit(0))
    for step in (0, 1, 4):  # nothing was looked at between
        films.add(unit(0), observation(50 * step), step)
    films.ended(unit(0), SUCCESS)
    (tmp_path / "film.mp4").write_bytes(films.finish()["count/0"])
    with av.open(str(tmp_path / "film.mp4")) as container:
        stream = container.streams.video[0]
        pictures = list(container.decode(video=0))
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.height, stream.width) == (160, 300)
    assert [round(float(picture.pts * picture.time_base) * HZ) for picture in pictures] == [0, 1, 4]
    for picture, grey in zip(pictures, (0, 50, 200), strict=True):
        array = picture.to_ndarray(format="rgb24").astype(int)
        assert np.abs(array[:, :200] - grey).max() <= 6 and np.abs(array[:80, 208:] - grey).max() <= 6
    start = (tmp_path / "film.mp4").read_bytes()
    assert start.index(b"moov") < start.index(b"mdat")  # a browser shows it before all of it is there


def test_an_attempt_that_came_to_nothing_is_no_part_of_the_video(tmp_path: Path) -> None:
    films = Films(SEEN, videos=1, failed=0)
    films.begin(unit(0))
    films.add(unit(0), observation(255), 0)
    films.drop(unit(0))
    play(films, dataclasses.replace(unit(0), attempt=1), SUCCESS, steps=2)
    frames = frames_of(films.finish()["count/0"], tmp_path)
    assert len(frames) == 3
    assert frames[0].max() <= 6


def test_only_the_first_trials_are_worth_a_look_between_actions() -> None:
    films = Films(SEEN, videos=1, failed=3)
    for trial in range(2):
        films.begin(unit(trial))
    assert [films.wants_every_step(unit(trial)) for trial in range(3)] == [True, False, False]
    films.close()


@pytest.mark.parametrize("films", [
    lambda: Films(SEEN, videos=0, failed=0), lambda: Films(DESCRIPTION, videos=2, failed=2)])
def test_who_wants_none_or_has_no_picture_gets_none(films: Any) -> None:
    made = films()
    play(made, unit(0), FAILURE)
    assert made.finish() == {} and made.problem == ""


def test_without_the_encoder_there_are_none_and_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    assert "pip install 'cosmos-actor[record]'" in missing()
    films = Films(SEEN, videos=1, failed=1)
    play(films, unit(0), SUCCESS)
    assert films.finish() == {}


def test_a_slow_encoder_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by whoever drives, nor longer than WAIT_S at the end; what does not fit into memory is given up."""
    go_on = threading.Event()

    class Slow(Mp4):
        def add(self, frame: np.ndarray, at: int = -1) -> None:
            go_on.wait(20)
            super().add(frame, at)

    monkeypatch.setattr(films_module, "Mp4", Slow)
    monkeypatch.setattr(films_module, "WAIT_S", 0.1)
    monkeypatch.setattr(films_module, "MOST_WAITING_BYTES", 3 * sum(
        int(np.prod(SEEN.observations[name].shape)) for name in cameras_of(SEEN)))
    films = Films(SEEN, videos=2, failed=0)
    try:
        play(films, unit(0), SUCCESS, steps=2)
        play(films, unit(1), SUCCESS, steps=2)
        assert films.finish() == {}
        assert films.problem == "a film was not ready 0.1 s after the evaluation"
    finally:
        go_on.set()


def test_a_full_disk_costs_the_film_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Mp4):
        def add(self, frame: np.ndarray, at: int = -1) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(films_module, "Mp4", Full)
    films = Films(SEEN, videos=1, failed=0)
    play(films, unit(0), SUCCESS)
    assert films.finish() == {}
    assert films.problem == "OSError: [Errno 28] No space left on device"


def test_small_pictures_are_enlarged_by_whole_pixels() -> None:
    one, other = np.arange(48, dtype=np.uint8).reshape(4, 4, 3), np.zeros((2, 3, 3), np.uint8)
    both = side_by_side([one, other])
    assert both.shape == (120, 210, 3)
    assert np.array_equal(both[::30, :120:30], one)
