"""What comes out of a simulator, and what goes into it, against its description. Pure.

Legend: n slots of a call, K actions of a chunk.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from .contract import DISCRETE, ActionSpec, ArraySpec, Description, Outcome, SimulatorError

FLOAT32, BOOL, INT8 = np.dtype(np.float32), np.dtype(bool), np.dtype(np.int8)


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
    """[n, K, …] int64 or float32, clipped to the bounds of a box. Raises BadRequest."""
    shape = (n, *actions.shape[1:2], *spec.shape)
    if actions.ndim < 2 or actions.shape != shape:
        raise BadRequest("actions have shape {}, {} slots need [{}, K{}]".format(
            list(actions.shape), n, n, "".join(", {}".format(size) for size in spec.shape)))
    if spec.kind == DISCRETE:
        if actions.dtype.kind not in "iu":
            raise BadRequest("actions are {}, this simulator takes whole numbers".format(actions.dtype))
        plain = actions.astype(np.int64)
        if actions.size and int(plain.view(np.uint64).max()) >= spec.n:  # a negative one is large as well
            raise BadRequest("actions go from {} to {}, this simulator has 0 to {}".format(
                actions.min(), actions.max(), spec.n - 1))
        return plain
    if actions.dtype.kind != "f":
        raise BadRequest("actions are {}, this simulator takes float32".format(actions.dtype))
    if not np.isfinite(actions).all():
        raise BadRequest("an action is NaN or infinite")
    plain = actions.astype(np.float32)
    if spec.low or spec.high:
        np.clip(plain, _bound(spec.low, spec, -np.inf), _bound(spec.high, spec, np.inf), out=plain)
    return plain


def _bound(values: Sequence[float], spec: ActionSpec, none: float) -> np.ndarray:
    return np.asarray(values or [none] * int(np.prod(spec.shape)), np.float32).reshape(spec.shape)


def checked_outcome(outcome: Outcome, n: int) -> Outcome:
    """The same in the dtypes of `Outcome`; it may be the session's own memory.

    Raises SimulatorError; NaNs are not looked for.
    """
    rewards, terminated, truncated, success = outcome
    return Outcome(
        _column("rewards", rewards, FLOAT32, n), _column("terminated", terminated, BOOL, n),
        _column("truncated", truncated, BOOL, n), None if success is None else _column("success", success, INT8, n))


def _column(name: str, value: Any, dtype: np.dtype[Any], n: int) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != (n,) or array.dtype.kind not in "fiub":
        raise SimulatorError("shape", "`{}` of a step has shape {} and dtype {}, {} slots need [{}]".format(
            name, list(array.shape), array.dtype, n, n))
    return array if array.dtype == dtype else array.astype(dtype)


def copied_observations(seen: Any, description: Description, n: int) -> Dict[str, np.ndarray]:
    """Name -> [n, …] in memory of its own. Raises SimulatorError; NaNs are not looked for."""
    specs = description.observations
    if not isinstance(seen, dict) or set(seen) != set(specs):
        names = sorted(map(str, seen)) if isinstance(seen, dict) else type(seen).__name__
        raise SimulatorError("shape", "observe gave {}, the description says {}".format(names, sorted(specs)))
    return {name: _copied(name, seen[name], spec, n) for name, spec in specs.items()}


def _copied(name: str, value: Any, spec: ArraySpec, n: int) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise SimulatorError("shape", "observation `{}` is {}, not an array".format(name, type(value).__name__))
    if value.dtype != spec.dtype:
        raise SimulatorError("shape", "observation `{}` is {}, the description says {}".format(
            name, value.dtype, spec.dtype))
    if value.shape != (n, *spec.shape):
        raise SimulatorError("shape", "observation `{}` has shape {}, the description says {}".format(
            name, list(value.shape[1:] if value.shape[:1] == (n,) else value.shape), list(spec.shape)))
    return np.array(value, order="C")


def not_finite(observations: Dict[str, np.ndarray], description: Description) -> List[Tuple[int, str]]:
    """(index among the n, name) of what is NaN or infinite and must not be; one for each index."""
    found: Dict[int, str] = {}
    for name, array in observations.items():
        if array.dtype.kind == "f" and description.observations[name].finite and _some_bad(array):
            rows = np.isfinite(array).reshape(len(array), -1).all(axis=1)
            for index in np.flatnonzero(~rows):
                found.setdefault(int(index), name)
    return sorted(found.items())


def _some_bad(array: np.ndarray) -> bool:
    return int(np.count_nonzero(np.isfinite(array))) < array.size


def no_observations(description: Description, n: int = 0) -> Dict[str, np.ndarray]:
    """Zeros in the place of n slots."""
    return {name: np.zeros((n, *spec.shape), spec.dtype) for name, spec in description.observations.items()}
