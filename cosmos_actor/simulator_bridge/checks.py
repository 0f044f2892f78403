"""What comes out of a simulator, and what goes into it, against its description. Pure.

Legend: n slots of a call, K actions of a chunk.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from .contract import DISCRETE, ActionSpec, Description, Outcome, SimulatorError

FLOAT32, BOOL, INT8 = np.dtype(np.float32), np.dtype(bool), np.dtype(np.int8)
SMALL = 256
"""Elements up to which Python's own numbers are quicker than numpy: between two steps of a world its code is cold."""


class BadRequest(ValueError):
    """The driver asked for something that makes no sense; nothing of it was done. One line."""


def checked_slots(slots: Sequence[int], envs: int) -> List[int]:
    """Plain numbers. Raises BadRequest for one that is not there or comes twice."""
    plain: List[int] = slots.tolist() if isinstance(slots, np.ndarray) else list(slots)
    if len(set(plain)) != len(plain):
        raise BadRequest("a slot is named twice: {}".format(plain))
    if plain and not (0 <= min(plain) and max(plain) < envs):
        raise BadRequest("there is no slot {}: this session has {}".format(
            next(slot for slot in plain if not 0 <= slot < envs), envs))
    return plain


def checked_actions(actions: np.ndarray, spec: ActionSpec, n: int) -> np.ndarray:
    """[n, K, …] int64 or float32, in memory of its own, clipped to the bounds of a box. Raises BadRequest."""
    shape = (n, *actions.shape[1:2], *spec.shape)
    if actions.ndim < 2 or actions.shape != shape:
        raise BadRequest("actions have shape {}, {} slots need [{}, K{}]".format(
            list(actions.shape), n, n, "".join(", {}".format(size) for size in spec.shape)))
    if spec.kind == DISCRETE:
        if actions.dtype.kind not in "iu":
            raise BadRequest("actions are {}, this simulator takes whole numbers".format(actions.dtype))
        plain = actions.astype(np.int64)
        values = plain.ravel().tolist()
        if values and not (0 <= min(values) and max(values) < spec.n):
            raise BadRequest("actions go from {} to {}, this simulator has 0 to {}".format(
                actions.min(), actions.max(), spec.n - 1))
        return plain
    if actions.dtype.kind != "f":
        raise BadRequest("actions are {}, this simulator takes float32".format(actions.dtype))
    plain = actions.astype(np.float32)
    if not all_finite(plain):
        raise BadRequest("an action is NaN or infinite")
    if spec.low or spec.high:
        np.clip(plain, *_bounds(spec), out=plain)
    return plain


@functools.lru_cache(maxsize=8)
def _bounds(spec: ActionSpec) -> Tuple[np.ndarray, np.ndarray]:
    size = int(np.prod(spec.shape))
    low, high = spec.low or (-np.inf,) * size, spec.high or (np.inf,) * size
    return np.asarray(low, np.float32).reshape(spec.shape), np.asarray(high, np.float32).reshape(spec.shape)


def checked_outcome(outcome: Outcome, n: int) -> Outcome:
    """The same in the dtypes of `Outcome`; it may be the session's own memory.

    Raises SimulatorError; NaNs are not looked for.
    """
    rewards, terminated, truncated, success = outcome
    return Outcome(
        _column("rewards", rewards, FLOAT32, n), _column("terminated", terminated, BOOL, n),
        _column("truncated", truncated, BOOL, n), None if success is None else _column("success", success, INT8, n))


def _column(name: str, value: Any, dtype: np.dtype[Any], n: int) -> np.ndarray:
    if type(value) is np.ndarray and value.dtype is dtype and value.shape == (n,):
        return value
    array = np.asarray(value)
    if array.shape != (n,) or array.dtype.kind not in "fiub":
        raise SimulatorError("shape", "`{}` of a step has shape {} and dtype {}, {} slots need [{}]".format(
            name, list(array.shape), array.dtype, n, n))
    return array if array.dtype == dtype else array.astype(dtype)


class Spec(NamedTuple):
    """An `ArraySpec` that is looked at for every step."""

    dtype: np.dtype[Any]
    shape: Tuple[int, ...]
    finite: bool
    """Whether there can be NaNs and infinities, and must not be."""


def parsed_specs(description: Description) -> Dict[str, Spec]:
    """Of its observations, in their order."""
    specs = {}
    for name, spec in description.observations.items():
        dtype = np.dtype(spec.dtype)
        specs[name] = Spec(dtype, tuple(spec.shape), spec.finite and dtype.kind == "f")
    return specs


def copied_observations(seen: Any, specs: Dict[str, Spec], n: int) -> Dict[str, np.ndarray]:
    """Name -> [n, …] in memory of its own. Raises SimulatorError; NaNs are not looked for."""
    if not isinstance(seen, dict) or seen.keys() != specs.keys():
        names = sorted(map(str, seen)) if isinstance(seen, dict) else type(seen).__name__
        raise SimulatorError("shape", "observe gave {}, the description says {}".format(names, sorted(specs)))
    return {name: _copied(name, seen[name], spec, n) for name, spec in specs.items()}


def _copied(name: str, value: Any, spec: Spec, n: int) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise SimulatorError("shape", "observation `{}` is {}, not an array".format(name, type(value).__name__))
    if value.dtype != spec.dtype:
        raise SimulatorError("shape", "observation `{}` is {}, the description says {}".format(
            name, value.dtype, spec.dtype))
    if value.shape != (n, *spec.shape):
        raise SimulatorError("shape", "observation `{}` has shape {}, the description says {}".format(
            name, list(value.shape[1:] if value.shape[:1] == (n,) else value.shape), list(spec.shape)))
    return np.array(value, order="C")


def not_finite(observations: Dict[str, np.ndarray], specs: Dict[str, Spec]) -> List[Tuple[int, str]]:
    """(index among the n, name) of what is NaN or infinite and must not be; one for each index."""
    found: Dict[int, str] = {}
    for name, array in observations.items():
        if specs[name].finite and not all_finite(array):
            rows = np.isfinite(array).reshape(len(array), -1).all(axis=1)
            for index in np.flatnonzero(~rows):
                found.setdefault(int(index), name)
    return sorted(found.items()) if found else []


def all_finite(array: np.ndarray) -> bool:
    if array.size <= SMALL and math.isfinite(sum(array.ravel().tolist())):
        return True
    return int(np.count_nonzero(np.isfinite(array))) == array.size


def no_observations(specs: Dict[str, Spec], n: int = 0) -> Dict[str, np.ndarray]:
    """Zeros in the place of n slots."""
    return {name: np.zeros((n, *spec.shape), spec.dtype) for name, spec in specs.items()}
