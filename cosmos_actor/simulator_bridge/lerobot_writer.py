"""Episodes to a dataset that `lerobot` reads: its format v3.0, written with pyarrow alone.

    DIR/meta/info.json · meta/stats.json · meta/tasks.parquet · meta/episodes/chunk-000/file-000.parquet
    DIR/data/chunk-000/file-000.parquet           a row a step: state, action, pictures as PNG
    DIR/videos/KEY/chunk-000/file-000.mp4         with `video`: one file an episode and camera, instead of PNG

Legend: T steps of an episode, S numbers of the state.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from .contract import DISCRETE, Description
from .lerobot_format import (
    ACTION,
    CHUNK_FILES,
    DATA_FILE_MB,
    DATA_PATH,
    EPISODES_PATH,
    KEY,
    STATE,
    VERSION,
    VIDEO_FILE_MB,
    VIDEO_PATH,
    Layout,
    features_of,
    huggingface,
    pandas_index,
)
from .lerobot_stats import PictureStatistics, of_numbers
from .mistakes import Mistake
from .mp4 import Mp4
from .optional import needed

KEYFRAME_EVERY = 2
"""Frames: training looks at single ones."""
PNG_LEVEL = 1
"""A third of the default's time for a tenth more bytes."""


class Episode(NamedTuple):
    """What is written of one."""

    task: int
    """Index among the dataset's tasks."""
    observations: Dict[str, np.ndarray]
    """Name -> [T, …]: what was seen before each action."""
    actions: np.ndarray
    """[T, …]"""
    rewards: np.ndarray
    """[T] float32: of each action"""
    success: np.ndarray
    """[T] bool: after each action"""


class DatasetWriter:
    """Nobody sees a part of it: it is written into `.NAME.part` beside it and renamed when it is whole.

        writer = DatasetWriter(…)  ──add(episode)…──>  finish()  or  discard()
    """

    def __init__(self, directory: Path, description: Description, tasks: Sequence[str], fps: float,
                 video: bool) -> None:
        """`tasks`: their texts, in the order of `Episode.task`, no two alike. Raises Mistake: the folder is there
        already, something else writes it, a package is missing."""
        self._pa, self._parquet = needed("pyarrow"), needed("pyarrow.parquet")
        self._layout = Layout.of(description)
        if self._layout.pictures:
            self._image = needed("av" if video else "PIL.Image")
        self._directory, self._description, self._tasks = directory, description, list(tasks)
        self._fps: float = int(fps) if fps == int(fps) else fps
        self._video = video
        self._features = features_of(self._layout, description.action, video)
        if directory.exists() or directory.is_symlink():
            raise Mistake("--out {}: it exists; name a folder that does not".format(directory))
        self._part = directory.parent / ".{}.part".format(directory.name)
        self._lock = self._taken()
        self._schema = self._arrow_schema()
        self._writer: Any = None
        self._file = -1
        self._episodes: List[Dict[str, Any]] = []
        self._numbers: Dict[str, List[np.ndarray]] = {}
        self._pictures: Dict[str, PictureStatistics] = {}
        self.frames = 0

    def add(self, episode: Episode) -> None:
        """Written when this returns. Raises OSError."""
        T, number = len(episode.actions), len(self._episodes)
        columns = self._columns(episode, number, T)
        row: Dict[str, Any] = {
            "episode_index": number, "tasks": [self._tasks[episode.task]], "length": T,
            "dataset_from_index": self.frames, "dataset_to_index": self.frames + T,
            "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        for key, values in columns.items():
            self._numbers.setdefault(key, []).append(values)
            row.update(_flat(key, of_numbers(values)))
        for name, key in self._layout.pictures.items():
            frames = episode.observations[name]
            statistics = PictureStatistics.of(frames)
            self._pictures[key] = statistics if key not in self._pictures else self._pictures[key] + statistics
            row.update(_flat(key, statistics.plain()))
            row.update(self._add_video(key, frames, number) if self._video else {})
        pictures = {} if self._video else {
            key: [{"bytes": self._png(frame), "path": None} for frame in episode.observations[name]]
            for name, key in self._layout.pictures.items()}
        row["data/chunk_index"], row["data/file_index"] = divmod(self._data_file(), CHUNK_FILES)
        self._writer.write_table(self._table(columns, pictures, T))
        self._episodes.append(row)
        self.frames += T

    def finish(self, about: Mapping[str, Any], robot: Optional[str] = None) -> int:
        """Make it whole and give it its name; its bytes. `about` goes into info.json, where `lerobot` does not look.

        Raises OSError, or Mistake if the name is taken meanwhile.
        """
        self._close_file()
        meta = self._part / "meta"
        meta.mkdir()
        self._write_tasks(meta)
        self._write_episodes()
        statistics = {key: of_numbers(np.concatenate(parts)) for key, parts in self._numbers.items()}
        statistics.update({key: seen.plain() for key, seen in self._pictures.items()})
        _write_json(meta / "stats.json", statistics)
        _write_json(meta / "info.json", self._info(about, robot))
        size = _on_disk(self._part)
        try:
            os.rename(str(self._part), str(self._directory))
        except OSError as error:
            raise Mistake("--out {}: {}".format(self._directory, error.strerror)) from error
        _flush(self._directory.parent)
        os.close(self._lock)
        return size

    def discard(self) -> None:
        """Nothing is left."""
        with contextlib.suppress(Exception):  # why it is discarded matters more
            self._close_file()
        shutil.rmtree(str(self._part), ignore_errors=True)
        os.close(self._lock)

    # ---- the folder

    def _taken(self) -> int:
        """The folder for the parts, empty and ours: what somebody left there who was killed is thrown away."""
        try:
            self._part.mkdir(parents=True, exist_ok=True)
            lock = os.open(str(self._part), os.O_RDONLY)
        except OSError as error:
            raise Mistake("--out {}: {}".format(self._directory, error.strerror)) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise Mistake("--out {}: another process records it".format(self._directory)) from error
        for left in self._part.iterdir():
            shutil.rmtree(str(left)) if left.is_dir() else left.unlink()
        return lock

    def _data_file(self) -> int:
        """Number of the file for the next episode, which is open."""
        if self._writer is not None and self._path_of_data().stat().st_size >= DATA_FILE_MB * 2**20:
            self._close_file()
        if self._writer is None:
            self._file += 1
            self._path_of_data().parent.mkdir(parents=True, exist_ok=True)
            self._writer = self._parquet.ParquetWriter(str(self._path_of_data()), self._schema, compression="snappy")
        return self._file

    def _path_of_data(self) -> Path:
        chunk, file = divmod(self._file, CHUNK_FILES)
        return self._part / DATA_PATH.format(chunk_index=chunk, file_index=file)

    def _close_file(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    # ---- rows

    def _columns(self, episode: Episode, number: int, T: int) -> Dict[str, np.ndarray]:
        """All but pictures: key -> [T] or [T, …]."""
        columns: Dict[str, np.ndarray] = {}
        if self._layout.state:
            columns[STATE] = self._layout.joined(episode.observations)
        columns[ACTION] = episode.actions.astype(np.int64) if self._description.action.kind == DISCRETE else (
            episode.actions.reshape(T, -1).astype(np.float32))
        done = np.zeros(T, bool)
        done[-1:] = True
        steps = np.arange(T, dtype=np.int64)
        columns.update({
            "next.reward": episode.rewards.astype(np.float32), "next.done": done,
            "next.success": episode.success.astype(bool), "timestamp": (steps / self._fps).astype(np.float32),
            "frame_index": steps, "episode_index": np.full(T, number), "index": self.frames + steps,
            "task_index": np.full(T, episode.task)})
        return columns

    def _arrow_schema(self) -> Any:
        pa = self._pa
        picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        fields = []
        for key, feature in self._features.items():
            if feature["dtype"] == "video":
                continue
            size = feature["shape"][0]
            kind = picture if feature["dtype"] == "image" else pa.type_for_alias(feature["dtype"])
            listed = feature["dtype"] != "image" and size != 1
            fields.append(pa.field(key, pa.list_(kind, size) if listed else kind))
        return pa.schema(fields, metadata=huggingface(self._features))

    def _table(self, columns: Dict[str, np.ndarray], pictures: Dict[str, List[Dict[str, Any]]], T: int) -> Any:
        pa, arrays = self._pa, []
        for field in self._schema:
            if field.name in pictures:
                arrays.append(pa.array(pictures[field.name], field.type))
                continue
            flat = pa.array(columns[field.name].reshape(-1))
            size = getattr(field.type, "list_size", 0)
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, size) if size else flat)
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def _png(self, frame: np.ndarray) -> bytes:
        out = io.BytesIO()
        self._image.fromarray(frame).save(out, "PNG", compress_level=PNG_LEVEL)
        return out.getvalue()

    def _add_video(self, key: str, frames: np.ndarray, number: int) -> Dict[str, Any]:
        chunk, file = divmod(number, CHUNK_FILES)
        path = self._part / VIDEO_PATH.format(video_key=key, chunk_index=chunk, file_index=file)
        path.parent.mkdir(parents=True, exist_ok=True)
        with Mp4(path, self._fps, keyframe_every=KEYFRAME_EVERY) as film:
            for frame in frames:
                film.add(frame)
        told = {"chunk_index": chunk, "file_index": file, "from_timestamp": 0.0,
                "to_timestamp": len(frames) / self._fps}
        return {"videos/{}/{}".format(key, name): value for name, value in told.items()}

    # ---- meta

    def _write_tasks(self, meta: Path) -> None:
        table = self._pa.table({"task_index": list(range(len(self._tasks))), "__index_level_0__": self._tasks})
        self._parquet.write_table(table.replace_schema_metadata(pandas_index("task_index")),
                                  str(meta / "tasks.parquet"))

    def _write_episodes(self) -> None:
        path = self._part / EPISODES_PATH.format(chunk_index=0, file_index=0)
        path.parent.mkdir(parents=True)
        self._parquet.write_table(self._pa.Table.from_pylist(self._episodes), str(path))

    def _info(self, about: Mapping[str, Any], robot: Optional[str]) -> Dict[str, Any]:
        return {
            "codebase_version": VERSION, "robot_type": robot,
            "total_episodes": len(self._episodes), "total_frames": self.frames, "total_tasks": len(self._tasks),
            "chunks_size": CHUNK_FILES, "data_files_size_in_mb": DATA_FILE_MB, "video_files_size_in_mb": VIDEO_FILE_MB,
            "fps": self._fps, "splits": {"train": "0:{}".format(len(self._episodes))}, "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._video else None, "features": self._features,
            KEY: {**about, **self._layout.plain()}}


def _flat(key: str, statistics: Dict[str, Any]) -> Dict[str, Any]:
    return {"stats/{}/{}".format(key, name): value for name, value in statistics.items()}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _on_disk(folder: Path) -> int:
    """Bytes of all files below, which are on the disk when this returns."""
    size = 0
    for path in sorted(folder.rglob("*")):
        _flush(path)
        size += path.stat().st_size if path.is_file() else 0
    _flush(folder)
    return size


def _flush(path: Path) -> None:
    descriptor = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
