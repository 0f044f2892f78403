"""How what a simulator shows becomes what a network reads: the same on the trainer's and on the engine's side.

Legend: n rows, D numbers of all vectors together, C channels of all images together, H x W pixels, W words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.simulator_bridge.contract import ArraySpec
from cosmos_actor.trainer.instructions import INSTRUCTION


class Seen(NamedTuple):
    """Arrays or tensors; those that there are none of have no columns."""

    vectors: Any
    """[n, D] float32"""
    images: Any
    """[n, C, H, W] uint8"""
    words: Any
    """[n, W] int64"""

    def rows(self, index: torch.Tensor | slice) -> Seen:
        """Of tensors."""
        return Seen(*(part[index] for part in self))

    def to(self, device: torch.device) -> Seen:
        """Arrays as tensors on `device`."""
        return Seen(*(torch.from_numpy(part).to(device) for part in self))


class ObservationLayout:
    """Arrays in the order of their names: images (uint8, two or three axes, for a network that sees), words (for one
    that reads), flattened vectors (the rest).

    The shorter of an image's outer axes is its channels; the last one if they tie. Raises BadValue naming the setting.
    """

    def __init__(self, observations: Mapping[str, ArraySpec], *, kind: str) -> None:
        self.specs = {name: observations[name] for name in sorted(observations)}
        sees = kind in ("cnn", "vla")
        pictured = [name for name, spec in self.specs.items() if sees and _is_image(spec)]
        self._images = {name: _channels_axis(self.specs[name].shape) for name in pictured}
        self._words = INSTRUCTION if kind == "vla" and INSTRUCTION in self.specs else ""
        self._vectors = [name for name in self.specs if name not in self._images and name != self._words]
        self.words = self.specs[self._words].shape[0] if self._words else 0
        """W"""
        self.channels = tuple(_channels(self.specs[name].shape) for name in self._images)
        """Of each image; their sum is C."""
        self.vector_width = sum(int(np.prod(self.specs[name].shape)) for name in self._vectors)
        self.image_shape = self._image_shape()
        if sees and not self._images:
            raise BadValue(f"a {kind} needs an image, and none of {', '.join(self.specs)} is uint8 with two or three "
                           "axes", setting="control.network.kind")

    def __call__(self, observations: Mapping[str, np.ndarray]) -> Seen:
        """Arrays [n, …] as described. Raises ValueError for a name or shape that is not."""
        rows = self._rows(observations)
        vectors = [np.asarray(observations[name], np.float32).reshape(rows, -1) for name in self._vectors]
        images = [_channels_first(observations[name], axis) for name, axis in self._images.items()]
        words = np.asarray(observations[self._words], np.int64) if self._words else np.empty((rows, 0), np.int64)
        return Seen(_joined(vectors, (rows, 0), np.float32), _joined(images, (rows, 0, 1, 1), np.uint8), words)

    def _rows(self, observations: Mapping[str, np.ndarray]) -> int:
        if observations.keys() != self.specs.keys():
            raise ValueError(f"observations are {sorted(observations)}, the model reads {list(self.specs)}")
        rows = len(next(iter(observations.values())))
        for name, spec in self.specs.items():
            if observations[name].shape != (rows, *spec.shape):
                raise ValueError(f"observation {name} is {observations[name].shape}, not {(rows, *spec.shape)}")
        return rows

    def _image_shape(self) -> tuple[int, int, int]:
        """(C, H, W); (0, 1, 1) without an image."""
        shapes = [_channels_first(np.empty((1, *self.specs[name].shape), np.uint8), axis).shape[1:]
                  for name, axis in self._images.items()]
        if len({shape[1:] for shape in shapes}) > 1:
            raise BadValue(f"images are stacked and have to be of one size, and {', '.join(self._images)} differ",
                           setting="control.network.kind")
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes else (0, 1, 1)


def _is_image(spec: ArraySpec) -> bool:
    return spec.dtype == "uint8" and len(spec.shape) in (2, 3)


def _channels(shape: tuple[int, ...]) -> int:
    return 1 if len(shape) == 2 else shape[_channels_axis(shape) - 1]


def _channels_axis(shape: tuple[int, ...]) -> int:
    """Of an array [n, *shape]; 0: it has none."""
    return 0 if len(shape) == 2 else 1 if shape[0] < shape[-1] else 3


def _channels_first(image: np.ndarray, axis: int) -> np.ndarray:
    return image[:, None] if axis == 0 else np.moveaxis(image, axis, 1)


def _joined(parts: list[np.ndarray], empty: tuple[int, ...], dtype: type) -> np.ndarray:
    if len(parts) > 1:
        return np.concatenate(parts, axis=1)
    return np.ascontiguousarray(parts[0]) if parts else np.empty(empty, dtype)
