"""Pictures on their way to another host, made smaller without loss.

A picture of a simulated world has large even areas: zlib at its quickest level makes one of a grid world some fifty
times smaller and one of a robot's cell half as large, at some tens of MB/s. Pure.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Dict, Mapping, Tuple

import numpy as np

from .contract import ArraySpec
from .messages import Stepped

NONE, ZLIB = "none", "zlib"
LEVEL = 1
"""More than that costs several times the time and saves little."""
LEAST_AXES = 2
"""Of what counts as a picture, without the slots: uint8 of so many or more."""
FIELDS = ("observations", "final_observations", "intermediate")


class BadSqueeze(ValueError):
    """What came is not what the description says, made smaller."""


def squeezed(stepped: Stepped, specs: Mapping[str, ArraySpec]) -> Stepped:
    """With each picture array as one row of bytes, where that is shorter."""
    pictures = [name for name, spec in specs.items() if _is_picture(spec)]
    return replace(stepped, **{field: {name: _smaller(array) if name in pictures else array
                                       for name, array in getattr(stepped, field).items()} for field in FIELDS})


def unsqueezed(stepped: Stepped, specs: Mapping[str, ArraySpec]) -> Stepped:
    """As the simulator saw it. Raises BadSqueeze."""
    n, K = len(stepped.rows), stepped.rewards.shape[1]
    leading = {"observations": (n,), "final_observations": (len(stepped.ended),), "intermediate": (n, K - 1)}
    return replace(stepped, **{name: _whole(getattr(stepped, name), specs, leading[name]) for name in FIELDS})


def _is_picture(spec: ArraySpec) -> bool:
    return spec.dtype == "uint8" and len(spec.shape) >= LEAST_AXES


def _smaller(array: np.ndarray) -> np.ndarray:
    made = zlib.compress(np.ascontiguousarray(array).data, LEVEL)
    return np.frombuffer(made, np.uint8) if len(made) < array.nbytes else array


def _whole(arrays: Mapping[str, np.ndarray], specs: Mapping[str, ArraySpec], leading: Tuple[int, ...]
           ) -> Dict[str, np.ndarray]:
    found = dict(arrays)
    for name, array in arrays.items():
        spec = specs.get(name)
        if spec is not None and _is_picture(spec) and array.dtype == np.uint8 and array.ndim == 1:
            found[name] = _inflated(name, array, (*leading, *spec.shape))
    return found


def _inflated(name: str, array: np.ndarray, shape: Tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    machine = zlib.decompressobj()
    try:
        whole = machine.decompress(array.tobytes(), size + 1)  # never more than was described, whatever it says
    except zlib.error as error:
        raise BadSqueeze("observation {} can not be made whole: {}".format(name, error)) from error
    if len(whole) != size or not machine.eof:
        raise BadSqueeze("observation {} is not {} bytes, as described, when it is made whole".format(name, size))
    return np.frombuffer(whole, np.uint8).reshape(shape)
