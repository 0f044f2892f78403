"""Evaluation episodes as videos: what a person looks at first when a policy fails.

    begin(unit) ──> add(frame)… ──> ended(success) ──> kept: `finish` gives its bytes
                               '──> dropped: the attempt came to nothing, or nobody wants to see it

Guarantee: no driver waits for a film, and no evaluation fails by one. A film that can not be made is left out, and
`problem` says why.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import numpy as np

from cosmos_actor.simulator_bridge.contract import FAILURE, Description, WorkUnit
from cosmos_actor.simulator_bridge.lerobot_format import WITHOUT_RATE_HZ, is_picture
from cosmos_actor.simulator_bridge.mistakes import Mistake
from cosmos_actor.simulator_bridge.mp4 import Mp4
from cosmos_actor.simulator_bridge.optional import needed

MOST_WAITING_BYTES = 512 * 2**20
"""Frames that wait for the encoder, of all films; one that would be more is given up: an encoder that can not follow
must not take the memory of a rollout."""
SMALLEST = 120
"""Lines of a picture that a person can look at; smaller ones are enlarged by whole pixels. LIBERO's 128 are not."""
WAIT_S = 20.0
"""For the encoder at the end of an evaluation; what is not ready then is left out."""


def cameras_of(description: Description) -> list[str]:
    """The observations that are pictures, by name."""
    return sorted(name for name, spec in description.observations.items() if is_picture(spec))


def missing() -> str:
    """Why there can be no films in this environment: one line, or nothing."""
    try:
        needed("av")
    except Mistake as error:
        return str(error)
    return ""


class Films:
    """Of one evaluation: the first `videos` trials of each task, and `failed` more that were failures."""

    def __init__(self, description: Description, videos: int, failed: int) -> None:
        self._cameras = cameras_of(description)
        self._hz = description.control_hz or WITHOUT_RATE_HZ
        self._videos, self._failed = videos, failed
        self._able = bool(self._cameras) and bool(videos or failed) and not missing()
        self._rolling: dict[str, _Film] = {}
        self._kept: dict[str, _Film] = {}
        self._failures: Counter[str] = Counter()
        """Task -> failures that are kept."""
        self._made = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._thread = ThreadPoolExecutor(1, "films")
        self._waiting = _Waiting()
        self.problem = ""
        """Why some are missing: one line."""

    def begin(self, unit: WorkUnit) -> None:
        """From its first picture on, if it may be kept."""
        if self._able and (self._first(unit) or self._failures[unit.task] < self._failed):
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="films-", ignore_cleanup_errors=True)
            self._made += 1
            path = Path(self._folder.name) / f"{self._made}.mp4"
            self._rolling[unit.unit_id] = _Film(path, self._hz, self._thread, self._waiting)

    def wants_every_step(self, unit: WorkUnit) -> bool:
        """Whether it is worth it that a simulator renders between the actions of a chunk."""
        return unit.unit_id in self._rolling and self._first(unit)

    def add(self, unit: WorkUnit, observation: Mapping[str, np.ndarray], step: int) -> None:
        """What was seen after `step` steps: name -> array; nothing where it is not filmed."""
        film = self._rolling.get(unit.unit_id)
        if film is not None:
            film.add([observation[name] for name in self._cameras], step)

    def ended(self, unit: WorkUnit, success: int) -> None:
        film = self._rolling.pop(unit.unit_id, None)
        if film is None:
            return
        late = success == FAILURE and self._failures[unit.task] < self._failed
        if self._first(unit) or late:
            self._failures[unit.task] += not self._first(unit)
            self._kept[unit.unit_id] = film
            film.end()
        else:
            film.drop()

    def drop(self, unit: WorkUnit) -> None:
        """Its attempt came to nothing; another begins anew."""
        film = self._rolling.pop(unit.unit_id, None)
        if film is not None:
            film.drop()

    def finish(self) -> dict[str, bytes]:
        """Unit -> its video; waits for the encoder for WAIT_S at most, and lets go of everything."""
        ends = [film.last for film in self._kept.values() if film.last is not None]
        late = wait(ends, WAIT_S).not_done
        found = {}
        for unit_id, film in self._kept.items():
            if film.last in late:
                film.problem = film.problem or f"a film was not ready {WAIT_S:g} s after the evaluation"
            if film.content:
                found[unit_id] = film.content
            self.problem = self.problem or film.problem
        self.close()
        return found

    def close(self) -> None:
        """Throw away what is left."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._folder is not None:
            self._folder.cleanup()

    def _first(self, unit: WorkUnit) -> bool:
        trial = unit.unit_id.rpartition("/")[2]
        return trial.isdigit() and int(trial) < self._videos


class _Waiting:
    """Bytes that wait for the encoder; counted by two threads."""

    def __init__(self) -> None:
        self._lock, self._bytes = threading.Lock(), 0

    def fits(self, more: int) -> bool:
        """Whether so many more may wait; they are counted then."""
        with self._lock:
            fit = self._bytes + more <= MOST_WAITING_BYTES
            self._bytes += more if fit else 0
            return fit

    def done(self, fewer: int) -> None:
        with self._lock:
            self._bytes -= fewer


class _Film:
    """One episode. What it is told is done by the thread, in order; the first problem ends it."""

    def __init__(self, path: Path, hz: float, thread: ThreadPoolExecutor, waiting: _Waiting) -> None:
        self._path, self._hz, self._thread, self._waiting = path, hz, thread, waiting
        self._mp4: Mp4 | None = None
        self.problem, self.content = "", b""
        self.last: Future[None] | None = None

    def add(self, pictures: list[np.ndarray], step: int) -> None:
        """uint8 [H, W, 3] of each camera."""
        size = sum(picture.nbytes for picture in pictures)
        if self.problem:
            return
        if not self._waiting.fits(size):
            self.problem = "the encoder of films can not follow"
            return

        def work() -> None:
            try:
                if self._mp4 is None:
                    self._mp4 = Mp4(self._path, self._hz)
                self._mp4.add(side_by_side(pictures), step)
            finally:
                self._waiting.done(size)

        self._submit(work)

    def end(self) -> None:
        """It is to be kept."""
        def work() -> None:
            if self._mp4 is not None:
                self._mp4.close()
                self.content = self._path.read_bytes()
                self._path.unlink()

        self._submit(work)

    def drop(self) -> None:
        def work() -> None:
            if self._mp4 is not None:
                with suppress(Exception):  # nobody will see it
                    self._mp4.close()
                self._path.unlink(missing_ok=True)

        self._thread.submit(work)

    def _submit(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            if self.problem:
                return
            try:
                work()
            except Exception as error:  # whatever an encoder or a disk says, the evaluation goes on
                self.problem = " ".join(f"{type(error).__name__}: {error}".split())

        self.last = self._thread.submit(guarded)


def side_by_side(pictures: list[np.ndarray]) -> np.ndarray:
    """Cameras in one picture uint8 [H, W, 3], enlarged by whole pixels where they are small."""
    factor = max(1, -(-SMALLEST // max(len(picture) for picture in pictures)))
    large = [picture.repeat(factor, 0).repeat(factor, 1) for picture in pictures]
    height = max(len(picture) for picture in large)
    return np.concatenate([np.pad(picture, ((0, height - len(picture)), (0, 0), (0, 0))) for picture in large], axis=1)
