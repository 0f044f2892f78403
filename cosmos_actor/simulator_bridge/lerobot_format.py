"""Which column of a LeRobotDataset (v3.0) is which array of ours. Pure: names, shapes and types; the standard library
and numpy.

    observation.images.NAME    uint8 [H, W, 3]            observation.state    all other arrays, joined, float32 [S]
    action                     float32 [A], or one int64  next.reward · next.done · next.success

Legend: T steps of an episode, S numbers of the state, A of an action.
"""

from __future__ import annotations

import json
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

import numpy as np

from .contract import DISCRETE, ActionSpec, ArraySpec, Description, TaskSpec
from .mistakes import Mistake

VERSION = "v3.0"
KEY = "cosmos_actor"
"""Of info.json: what `lerobot` has no place for."""
STATE, ACTION, PICTURES = "observation.state", "action", "observation.images."
CHUNK_FILES, DATA_FILE_MB, VIDEO_FILE_MB = 1000, 100, 200
"""Files of a folder, and what a file may hold: as lerobot has them by default."""
FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH, EPISODES_PATH = "data/" + FILE + ".parquet", "meta/episodes/" + FILE + ".parquet"
VIDEO_PATH = "videos/{video_key}/" + FILE + ".mp4"
WITHOUT_RATE_HZ = 10
"""Frames a second where a simulator has no such notion; a dataset has to have one."""


class Part(NamedTuple):
    """One array of the state."""

    name: str
    spec: ArraySpec

    @property
    def size(self) -> int:
        return int(np.prod(self.spec.shape, dtype=np.int64))


class Layout(NamedTuple):
    """Where each observation is."""

    pictures: Dict[str, str]
    """Name -> column."""
    shapes: Dict[str, Sequence[int]]
    """Column -> [H, W, 3]"""
    state: List[Part]
    """In the order in which they are joined, which is that of their names."""

    @classmethod
    def of(cls, description: Description) -> Layout:
        """Raises Mistake for two names that would be one column."""
        pictures: Dict[str, str] = {}
        state = []
        for name, spec in sorted(description.observations.items()):
            if is_picture(spec):
                pictures[name] = PICTURES + name.replace("/", ".")
            else:
                state.append(Part(name, spec))
        if len(set(pictures.values())) < len(pictures):
            raise Mistake("{}: two pictures have one name but for `/` and `.`: {}".format(
                description.simulator, ", ".join(pictures)))
        return cls(pictures, {key: description.observations[name].shape for name, key in pictures.items()}, state)

    def joined(self, observations: Mapping[str, np.ndarray]) -> np.ndarray:
        """[T, S] float32. Raises Mistake for a whole number that a float32 can not hold."""
        columns = []
        for name, _ in self.state:
            array = observations[name]
            column = array.reshape(len(array), -1).astype(np.float32)
            if array.dtype.kind in "iu" and not np.array_equal(column.astype(array.dtype), array.reshape(column.shape)):
                raise Mistake("observation `{}` has whole numbers that a float32 can not hold".format(name))
            columns.append(column)
        return np.concatenate(columns, axis=1)

    def parted(self, state: np.ndarray) -> Dict[str, np.ndarray]:
        """What was joined: name -> [T, …] of its own shape and dtype."""
        found, at = {}, 0
        for part in self.state:
            column = state[:, at:at + part.size]
            found[part.name] = column.reshape(len(state), *part.spec.shape).astype(part.spec.dtype)
            at += part.size
        return found

    def plain(self) -> Dict[str, Any]:
        """For info.json, so that other programs can tell as well."""
        return {"images": self.pictures, "state": [
            {"name": part.name, "shape": list(part.spec.shape), "dtype": part.spec.dtype} for part in self.state]}


def is_picture(spec: ArraySpec) -> bool:
    return spec.dtype == "uint8" and len(spec.shape) == 3 and spec.shape[2] == 3


def features_of(layout: Layout, action: ActionSpec, video: bool) -> Dict[str, Any]:
    """`features` of info.json, in the order of the columns. Raises Mistake for pictures that no video can hold."""
    features: Dict[str, Any] = {}
    for key, shape in layout.shapes.items():
        if video and (shape[0] % 2 or shape[1] % 2):
            raise Mistake("--video: `{}` is {} x {}, and H.264 has even sizes only: leave --video out".format(
                key[len(PICTURES):], shape[0], shape[1]))
        features[key] = {"dtype": "video" if video else "image", "shape": list(shape),
                         "names": ["height", "width", "channels"]}
    names = [name for part in layout.state for name in _numbered(part.name, part.size)]
    if names:
        features[STATE] = {"dtype": "float32", "shape": [len(names)], "names": names}
    size = int(np.prod(action.shape, dtype=np.int64))
    features[ACTION] = {"dtype": action.dtype, "shape": [size],
                        "names": ["action"] if action.kind == DISCRETE else _numbered("action", size)}
    for key, dtype in (("next.reward", "float32"), ("next.done", "bool"), ("next.success", "bool"),
                       ("timestamp", "float32"), ("frame_index", "int64"), ("episode_index", "int64"),
                       ("index", "int64"), ("task_index", "int64")):
        features[key] = {"dtype": dtype, "shape": [1], "names": None}
    return features


def _numbered(name: str, size: int) -> List[str]:
    return [name] if size == 1 else ["{}.{}".format(name, index) for index in range(size)]


def texts_of(tasks: Sequence[TaskSpec]) -> List[str]:
    """What a policy is told of each; no two alike, since `lerobot` knows tasks by their texts."""
    texts = [" ".join(task.instruction.split()) or task.name for task in tasks]
    return [text if texts.count(text) == 1 else "{} ({})".format(text, task.name) for text, task in zip(texts, tasks)]


def huggingface(features: Mapping[str, Mapping[str, Any]]) -> Dict[str, str]:
    """Metadata of a parquet file by which `datasets` knows pictures and lists."""
    told: Dict[str, Any] = {}
    for key, feature in features.items():
        value = {"dtype": feature["dtype"], "_type": "Value"}
        if feature["dtype"] == "image":
            value = {"_type": "Image"}
        elif feature["shape"] != [1]:
            value = {"feature": value, "length": feature["shape"][0], "_type": "Sequence"}
        if feature["dtype"] != "video":
            told[key] = value
    return {"huggingface": json.dumps({"info": {"features": told}})}


def pandas_index(column: str) -> Dict[str, str]:
    """Metadata of a parquet file of one column of whole numbers and an index of texts, as pandas writes a frame."""
    index = "__index_level_0__"
    columns = [{"name": name, "field_name": field, "pandas_type": kind, "numpy_type": numpy_type, "metadata": None}
               for name, field, kind, numpy_type in (
                   (column, column, "int64", "int64"), (None, index, "unicode", "object"))]
    return {"pandas": json.dumps({
        "index_columns": [index], "columns": columns, "creator": {"library": "pyarrow", "version": ""},
        "column_indexes": [{"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object",
                            "metadata": {"encoding": "UTF-8"}}], "pandas_version": "1.5.3"})}
