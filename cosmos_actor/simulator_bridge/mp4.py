"""Pictures to H.264 that every browser plays, through PyAV."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from .optional import needed

CODEC, PIXELS = "libx264", "yuv420p"
"""What all browsers decode."""
CRF = 20
"""Constant quality; 18 is hard to tell from the original, 23 is the codec's own choice."""
FINEST_HZ = 1000
"""Denominator that a rate is rounded to."""


def rate_of(hz: float) -> Fraction:
    """Frames a second as the container has them."""
    return Fraction(hz).limit_denominator(FINEST_HZ)


class Mp4:
    """A file that is whole when the block ends: `with Mp4(path, hz=20) as film: film.add(frame)`.

    An odd width or height is filled up by one line, since this kind of pixels has none.
    """

    def __init__(self, path: Path, hz: float, *, extra: str = "record", keyframe_every: int = 0) -> None:
        """`keyframe_every`: frames; 0 is what the codec thinks best, few make it quick to look at any frame. Raises
        Mistake without PyAV, and OSError."""
        self._av = needed("av", extra)
        self._rate = rate_of(hz)
        self._options = {"crf": str(CRF), "preset": "veryfast", "threads": "1"}
        if keyframe_every:
            self._options["g"] = str(keyframe_every)
        self._container = self._av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
        self._stream: Any = None
        self.frames = 0
        self._next = 0

    def add(self, frame: np.ndarray, at: int = -1) -> None:
        """uint8 [H, W, 3], shown from `at` / hz seconds on, later than the one before; -1: right after that one."""
        frame, at = even(frame), self._next if at < 0 else at
        if self._stream is None:
            self._stream = self._container.add_stream(CODEC, rate=self._rate, options=self._options)
            self._stream.height, self._stream.width = frame.shape[:2]
            self._stream.pix_fmt = PIXELS
        picture = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        picture.pts, picture.time_base = at, 1 / self._rate
        for packet in self._stream.encode(picture):
            self._container.mux(packet)
        self.frames, self._next = self.frames + 1, at + 1

    def close(self) -> None:
        """Also if it raises, the file is closed. Raises OSError and what PyAV raises."""
        with self._container:
            for packet in self._stream.encode(None) if self._stream is not None else ():
                self._container.mux(packet)

    def __enter__(self) -> Mp4:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def read_mp4(path: Path, extra: str = "record") -> Iterator[np.ndarray]:
    """uint8 [H, W, 3] of each frame, in order."""
    av: Any = needed("av", extra)
    with av.open(str(path)) as container:
        for picture in container.decode(video=0):
            yield picture.to_ndarray(format="rgb24")


def even(frame: np.ndarray) -> np.ndarray:
    """With an even height and width: the last line and column once more where they are odd."""
    odd = [(0, size % 2) for size in frame.shape[:2]]
    return np.pad(frame, [*odd, (0, 0)], mode="edge") if frame.shape[0] % 2 or frame.shape[1] % 2 else frame
