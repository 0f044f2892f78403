"""Demonstrations that `cosmos-actor sim record` wrote, for behaviour cloning. Needs pyarrow, and Pillow or PyAV.

    demonstrations = Demonstrations.open(DIR)
    chunks = demonstrations.chunks(horizon=8)
    some = chunks.sample(np.random.default_rng(seed), n=64)

Legend: N frames of the dataset, n frames of a sample, K actions of a chunk, A numbers of an action.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.actors.errors import UserError
from cosmos_actor.simulator_bridge.contract import DISCRETE, Description
from cosmos_actor.simulator_bridge.lerobot_format import ACTION, KEY, STATE, VERSION, VIDEO_PATH, Layout
from cosmos_actor.simulator_bridge.mistakes import Mistake
from cosmos_actor.simulator_bridge.mp4 import read_mp4
from cosmos_actor.simulator_bridge.optional import needed
from cosmos_actor.simulator_bridge.telling import description_of

MEMORY_MB = 4096
"""Decoded pictures that are kept at most; those of a larger dataset are decoded each time they are drawn."""
BATCH = 256
"""Pictures that are decoded at a time: compressed ones of the whole set need not be in memory as well."""


class BadDemonstrations(UserError):
    """A folder that is no whole set of demonstrations; the line names the file and what is wrong with it."""


@dataclass(frozen=True)
class Chunk:
    """n frames, and what was done from each of them on."""

    observations: Mapping[str, np.ndarray]
    """Name -> [n, …], as the simulator's description has them."""
    actions: np.ndarray
    """[n, K, …] float32, or [n, K] int64 for a discrete action; zero where `mask` is false"""
    mask: np.ndarray
    """[n, K] bool: false past the end of the episode"""
    tasks: np.ndarray
    """[n] int64: index in `Demonstrations.tasks`"""


class Pictures:
    """uint8 [N, H, W, 3] of one camera: decoded once, or each time they are asked for."""

    def __init__(self, shape: Sequence[int], decoded: np.ndarray | None, encoded: Sequence[bytes]) -> None:
        self._shape, self._decoded, self._encoded = tuple(shape), decoded, encoded

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        if self._decoded is not None:
            return self._decoded[rows]
        return np.stack([_decoded(self._encoded[row]) for row in rows]).reshape(len(rows), *self._shape)


class Demonstrations:
    """Every frame is where the simulator showed it, and belongs to exactly one episode."""

    def __init__(self, description: Description, tasks: Sequence[str], statistics: Mapping[str, Any],
                 numbers: Mapping[str, np.ndarray], pictures: Mapping[str, Pictures], ends: np.ndarray) -> None:
        """`numbers`: name -> [N, …] of what is no picture, and `action`, `task_index`. `ends`: [N] int64, where the
        episode of each frame ends."""
        self.description, self.tasks, self.statistics = description, list(tasks), statistics
        self._numbers, self._pictures, self._ends = dict(numbers), pictures, ends
        self.actions = self._numbers.pop(ACTION)
        """[N, …]"""
        self.task_of = self._numbers.pop("task_index")
        """[N] int64"""

    @classmethod
    def open(cls, directory: str | Path, *, memory_mb: int = MEMORY_MB) -> Demonstrations:
        """Read it all. Raises BadDemonstrations, or UserError for a package that is missing."""
        try:
            return _Reader(Path(directory), memory_mb).read()
        except Mistake as error:
            raise UserError(str(error)) from error

    @property
    def frames(self) -> int:
        return len(self._ends)

    @property
    def episodes(self) -> int:
        return len(np.unique(self._ends))

    def observations(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Name -> [n, …] of these frames."""
        return {name: (self._pictures if name in self._pictures else self._numbers)[name][rows]
                for name in self.description.observations}

    def chunks(self, horizon: int) -> Chunks:
        return Chunks(self, horizon)

    def chunk(self, rows: np.ndarray, horizon: int) -> Chunk:
        """What was seen in these frames, and the `horizon` actions from each of them on."""
        at = rows[:, None] + np.arange(horizon)
        ends = self._ends[rows][:, None]
        mask = at < ends
        actions = self.actions[np.minimum(at, ends - 1)]
        actions[~mask] = 0
        return Chunk(self.observations(rows), actions, mask, self.task_of[rows])


@dataclass(frozen=True)
class Chunks:
    """Chunks of K = `horizon` actions. One begins at every frame, also at the last ones of an episode."""

    demonstrations: Demonstrations
    horizon: int

    def sample(self, generator: np.random.Generator, n: int) -> Chunk:
        """n frames with replacement, each as likely as any other."""
        return self.demonstrations.chunk(generator.integers(0, self.demonstrations.frames, n), self.horizon)


class _Reader:
    def __init__(self, directory: Path, memory_mb: int) -> None:
        self._directory, self._memory_mb = directory, memory_mb
        self._parquet = needed("pyarrow.parquet")

    def read(self) -> Demonstrations:
        info = self._json("meta/info.json")
        if info.get("codebase_version") != VERSION:
            raise self._bad("meta/info.json", f"version {info.get('codebase_version')} of the format, not {VERSION}")
        if KEY not in info:
            raise self._bad("meta/info.json", f"no `{KEY}`: it was not written by `cosmos-actor sim record`")
        try:
            description, tasks = description_of(info[KEY]["description"]), list(info[KEY]["tasks"])
            frames, episodes, features = info["total_frames"], info["total_episodes"], info["features"]
            layout = Layout.of(description)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._bad("meta/info.json", f"{type(error).__name__}: {error}") from error
        lengths = self._lengths(episodes, frames)
        numbers = self._numbers(description, layout, frames)
        pictures = {name: self._pictures(key, features.get(key, {}), layout.shapes[key], lengths)
                    for name, key in layout.pictures.items()}
        ends = np.repeat(np.cumsum(lengths), lengths)
        return Demonstrations(description, tasks, self._json("meta/stats.json"), numbers, pictures, ends)

    # ---- numbers

    def _lengths(self, episodes: int, frames: int) -> np.ndarray:
        """[episodes] int64"""
        parts = [table.column("length").to_numpy() for _, table in self._tables("meta/episodes", ["length"])]
        lengths = np.concatenate(parts).astype(np.int64)
        if len(lengths) != episodes or lengths.sum() != frames or (lengths < 1).any():
            raise self._bad("meta/episodes", f"{len(lengths)} episodes of {lengths.sum()} frames, meta/info.json says "
                            f"{episodes} of {frames}")
        return lengths

    def _numbers(self, description: Description, layout: Layout, frames: int) -> dict[str, np.ndarray]:
        wanted = [*([STATE] if layout.state else []), ACTION, "task_index"]
        parts: dict[str, list[np.ndarray]] = {key: [] for key in wanted}
        for path, table in self._tables("data", wanted):
            for key in wanted:
                parts[key].append(self._column(path, key, table))
        columns = {}
        for key, arrays in parts.items():
            if len({array.shape[1:] for array in arrays}) > 1 or sum(map(len, arrays)) != frames:
                raise self._bad("data", f"`{key}` has {sum(map(len, arrays))} rows, meta/info.json says {frames}")
            columns[key] = np.concatenate(arrays)
        found = {"task_index": columns["task_index"].astype(np.int64)}
        if layout.state:
            self._check_shape(STATE, columns[STATE], (sum(part.size for part in layout.state),))
            found.update(layout.parted(columns[STATE]))
        spec = description.action
        size = int(np.prod(spec.shape, dtype=np.int64))
        self._check_shape(ACTION, columns[ACTION], () if spec.kind == DISCRETE or size == 1 else (size,))
        found[ACTION] = columns[ACTION].astype(spec.dtype).reshape(frames, *spec.shape)
        if not np.isfinite(found[ACTION]).all():
            raise self._bad("data", "an action is NaN or infinite")
        return found

    def _check_shape(self, key: str, column: np.ndarray, shape: tuple[int, ...]) -> None:
        given, told = column.shape[1:] or (1,), shape or (1,)
        if given != told:
            raise self._bad("data", f"`{key}` has {list(given)} numbers a frame, meta/info.json says {list(told)}")

    def _column(self, path: str, key: str, table: Any) -> np.ndarray:
        """[rows] or [rows, size]"""
        column = table.column(key).combine_chunks()
        if column.null_count:
            raise self._bad(path, f"`{key}` has empty rows")
        size = getattr(column.type, "list_size", None)
        if size is None:
            return np.asarray(column.to_numpy(zero_copy_only=False))
        return np.asarray(column.flatten().to_numpy(zero_copy_only=False)).reshape(-1, size)

    # ---- pictures

    def _pictures(self, key: str, feature: Mapping[str, Any], shape: Sequence[int], lengths: np.ndarray) -> Pictures:
        frames, video = int(lengths.sum()), feature.get("dtype") == "video"
        if list(feature.get("shape", [])) != list(shape):
            raise self._bad("meta/info.json", f"`{key}` is {feature.get('shape')}, and its simulator has {list(shape)}")
        megabytes = frames * int(np.prod(shape)) / 2**20
        if megabytes > self._memory_mb:
            if video:
                raise self._bad("videos", f"the pictures of `{key}` take {megabytes:,.0f} MB, more than the "
                                f"{self._memory_mb:,} that are kept: record them without --video")
            return Pictures(shape, None, [one for part in self._encoded(key) for one in part])
        decoded = np.empty((frames, *shape), np.uint8)
        at = 0
        for part in self._from_videos(key, lengths) if video else self._from_png(key):
            if part.shape[1:] != tuple(shape) or at + len(part) > frames:
                raise self._bad("data", f"`{key}` has pictures of {list(part.shape[1:])}, meta/info.json says "
                                f"{frames} of {list(shape)}")
            decoded[at:at + len(part)] = part
            at += len(part)
        if at != frames:
            raise self._bad("data", f"`{key}` has {at} pictures, meta/info.json says {frames}")
        return Pictures(shape, decoded, ())

    def _from_png(self, key: str) -> Iterator[np.ndarray]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding lets go of the interpreter's lock
            for part in self._encoded(key):
                try:
                    yield np.stack(list(pool.map(_decoded, part)))
                except (OSError, ValueError, SyntaxError) as error:  # Pillow's, of a broken PNG
                    raise self._bad("data", f"`{key}` has a picture that can not be read: {error}") from error

    def _encoded(self, key: str) -> Iterator[list[bytes]]:
        needed("PIL.Image")
        for path in self._files("data"):
            def batches(path: Path = path) -> Iterator[Any]:
                return self._parquet.ParquetFile(path).iter_batches(BATCH, columns=[key])  # type: ignore[no-any-return]

            for batch in self._guarded(path, batches):
                if not batch.num_columns:
                    raise self._bad(self._name(path), f"no column `{key}`")
                encoded = batch.column(0).field("bytes").to_pylist()
                if None in encoded:
                    raise self._bad(self._name(path), f"`{key}` has empty rows")
                yield encoded

    def _from_videos(self, key: str, lengths: np.ndarray) -> Iterator[np.ndarray]:
        """An episode at a time: `sim record` writes a file for each."""
        columns = [f"videos/{key}/chunk_index", f"videos/{key}/file_index"]
        where = [row for _, table in self._tables("meta/episodes", columns)
                 for row in zip(*(table.column(name).to_pylist() for name in columns), strict=True)]
        for (chunk, file), length in zip(where, lengths, strict=True):
            path = self._directory / VIDEO_PATH.format(video_key=key, chunk_index=chunk, file_index=file)
            frames = list(self._guarded(path, lambda path=path: read_mp4(path)))
            if len(frames) != length:
                raise self._bad(self._name(path), f"{len(frames)} frames, meta/episodes says {length}")
            yield np.stack(frames)

    # ---- files

    def _tables(self, folder: str, columns: list[str]) -> Iterator[tuple[str, Any]]:
        for path in self._files(folder):
            def read(path: Path = path) -> Iterator[Any]:
                return iter([self._parquet.ParquetFile(path).read(columns)])

            for table in self._guarded(path, read):
                missing = [name for name in columns if name not in table.column_names]
                if missing:
                    raise self._bad(self._name(path), f"no column `{missing[0]}`")
                yield self._name(path), table

    def _files(self, folder: str) -> list[Path]:
        found = sorted((self._directory / folder).glob("*/*.parquet"))
        if not found:
            raise self._bad(folder, "no chunk-000/file-000.parquet is there")
        return found

    def _guarded(self, path: Path, read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """What `read` gives. pyarrow raises ArrowInvalid, a ValueError, and OSError for what is no such file; PyAV's
        errors are OSErrors or ValueErrors too."""
        try:
            yield from read()
        except (OSError, ValueError, KeyError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self._bad(self._name(path), f"it can not be read: {said}") from error

    def _json(self, name: str) -> dict[str, Any]:
        try:
            told = json.loads((self._directory / name).read_text(encoding="utf-8"))
        except OSError as error:
            raise self._bad(name, error.strerror or str(error)) from error
        except ValueError as error:
            raise self._bad(name, f"it is not JSON: {error}") from error
        if not isinstance(told, dict):
            raise self._bad(name, "it is no JSON object")
        return told

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._directory))

    def _bad(self, name: str, problem: str) -> BadDemonstrations:
        return BadDemonstrations(f"demonstrations {self._directory}: {name}: {problem}")


def _decoded(encoded: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(encoded)))
