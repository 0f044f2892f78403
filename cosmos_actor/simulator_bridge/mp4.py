"""Pictures to H.264 that every browser plays, through PyAV."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, Iterable, Iterator

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


def write_mp4(path: Path, frames: Iterable[np.ndarray], hz: float, *, extra: str = "record",
              keyframe_every: int = 0) -> int:
    """Write uint8 [H, W, 3] frames of one size; how many they were. Raises Mistake without PyAV, OSError, and what
    PyAV raises.

    An odd width or height is filled up by one line, since this kind of pixels has none. `keyframe_every`: frames; 0 is
    what the codec thinks best, few make it quick to look at any frame.
    """
    av = needed("av", extra)
    options = {"crf": str(CRF), "preset": "veryfast", "threads": "1"}
    if keyframe_every:
        options["g"] = str(keyframe_every)
    count = 0
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = None
        for frame in frames:
            frame = even(frame)
            if stream is None:
                stream = container.add_stream(CODEC, rate=rate_of(hz), options=options)
                stream.height, stream.width = frame.shape[:2]
                stream.pix_fmt = PIXELS
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            picture.pts, picture.time_base = count, 1 / rate_of(hz)
            for packet in stream.encode(picture):
                container.mux(packet)
            count += 1
        if stream is not None:
            for packet in stream.encode(None):
                container.mux(packet)
    return count


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
