"""How a policy's numbers become a simulator's, and back: cameras, state, actions, gripper, normaliser.

A mistake here is silent: a picture turned the wrong way or a gripper with the wrong sign costs success rate, not an
error. So every convention is a field, both sides have the same map or do not work together, and `difference` names the
first field in which two differ.

Legend: n slots, S numbers of a state, A of an action, K actions of a chunk.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Dict, List, Mapping, Tuple

import numpy as np

TURNS = {0: 0, 90: 1, 180: 2, 270: 3}
"""Degrees counter-clockwise -> quarter turns."""
SMALLEST_STD = 1e-6
"""A joint that never moved in the data has no spread; divided by nothing it would rule all others."""


class BadEmbodiment(ValueError):
    """A map that contradicts itself, or arrays that are not of it. One line that names the field."""


def _set(frozen: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


@dataclass(frozen=True)
class Camera:
    """One picture of the observation."""

    name: str
    height: int
    width: int
    """As the policy sees it, after it was turned."""
    rotation: int = 0
    """Degrees counter-clockwise by which the simulator's picture is turned for the policy: 0, 90, 180 or 270."""


@dataclass(frozen=True)
class Field:
    """Some of the numbers of a state or an action, in their order."""

    name: str
    size: int


@dataclass(frozen=True)
class Affine:
    """simulator = scale × policy + offset. A policy's gripper [0, 1] for a simulator's [1, -1] is (-2, 1)."""

    scale: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        _set(self, scale=float(self.scale), offset=float(self.offset))  # 1 and 1.0 have one digest


@dataclass(frozen=True)
class Normaliser:
    """normalised = (number - mean) / std; empty: nothing is done."""

    mean: Tuple[float, ...] = ()
    std: Tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _set(self, mean=tuple(map(float, self.mean)), std=tuple(map(float, self.std)))


@dataclass(frozen=True)
class EmbodimentMap:
    """Everything that a policy and a simulator have to agree on about one body."""

    name: str
    cameras: Tuple[Camera, ...] = ()
    """In the order in which the policy takes them."""
    state: Tuple[Field, ...] = ()
    """Arrays of the observation that are joined into the policy's `state` [S], in this order."""
    action: Tuple[Field, ...] = ()
    action_frame: str = "base"
    """What positions and rotations of an action refer to: base, tool, joint …"""
    gripper: str = ""
    """The field of the action that is the gripper; empty: there is none."""
    gripper_map: Affine = Affine()
    state_normaliser: Normaliser = Normaliser()
    action_normaliser: Normaliser = Normaliser()
    control_hz: float = 0.0

    def __post_init__(self) -> None:
        _set(self, cameras=tuple(self.cameras), state=tuple(self.state), action=tuple(self.action),
             control_hz=float(self.control_hz))
        for camera in self.cameras:
            if camera.rotation not in TURNS:
                raise BadEmbodiment("cameras.{}.rotation is {}, not 0, 90, 180 or 270".format(
                    camera.name, camera.rotation))
        for name, size in (("state", self.state_size), ("action", self.action_size)):
            normaliser: Normaliser = getattr(self, name + "_normaliser")
            if {len(normaliser.mean), len(normaliser.std)} not in ({0}, {size}):
                raise BadEmbodiment("{}_normaliser has {} means and {} stds for {} numbers".format(
                    name, len(normaliser.mean), len(normaliser.std), size))
        if self.gripper and self.gripper not in [part.name for part in self.action]:
            raise BadEmbodiment("gripper {} is no field of the action".format(self.gripper))
        if self.gripper_map.scale == 0:
            raise BadEmbodiment("gripper_map.scale is 0, which can not be turned back")

    @property
    def state_size(self) -> int:
        return sum(part.size for part in self.state)

    @property
    def action_size(self) -> int:
        return sum(part.size for part in self.action)

    # ---- as text

    def plain(self) -> Dict[str, Any]:
        """Numbers, texts, lists and dicts only; `from_plain` makes the same map of it."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_plain(cls, plain: Any) -> EmbodimentMap:
        """Raises BadEmbodiment for what is no map."""
        try:
            return cls(**{name: _read(name, value) for name, value in dict(plain).items()})
        except BadEmbodiment:
            raise
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadEmbodiment("this is no embodiment: {}".format(error)) from error

    @property
    def digest(self) -> str:
        """sha256 in hex; equal for equal maps, on every host and Python."""
        text = json.dumps(self.plain(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    # ---- arrays

    def to_policy(self, observations: Mapping[str, np.ndarray]) -> Dict[str, np.ndarray]:
        """A simulator's [n, …] as the policy takes them: cameras turned, `state` [n, S] float32 joined and normalised.

        Raises BadEmbodiment naming what is missing or has another shape.
        """
        seen = {camera.name: self._turned(camera, _array(observations, camera.name)) for camera in self.cameras}
        if self.state:
            parts = [self._part(observations, part) for part in self.state]
            seen["state"] = _normalised(np.concatenate(parts, axis=1), self.state_normaliser)
        return seen

    def from_policy(self, seen: Mapping[str, np.ndarray]) -> Dict[str, np.ndarray]:
        """What `to_policy` was given, from what it gave."""
        observations = {
            camera.name: np.ascontiguousarray(np.rot90(seen[camera.name], -TURNS[camera.rotation], axes=(1, 2)))
            for camera in self.cameras}
        if self.state:
            state = _restored(_array(seen, "state"), self.state_normaliser)
            observations.update(_split(state, self.state))
        return observations

    def to_simulator(self, actions: np.ndarray) -> np.ndarray:
        """A policy's actions [n, A] or [n, K, A] in the simulator's numbers, float32."""
        self._check_actions(actions)
        given = _restored(actions, self.action_normaliser)
        where = self._gripper_slice()
        given[..., where] = self.gripper_map.scale * given[..., where] + self.gripper_map.offset
        return given

    def to_policy_actions(self, actions: np.ndarray) -> np.ndarray:
        """What `to_simulator` was given, from what it gave: demonstrations of a simulator as the policy's targets."""
        self._check_actions(actions)
        where = self._gripper_slice()
        taken = np.array(actions, np.float32)
        taken[..., where] = (taken[..., where] - self.gripper_map.offset) / self.gripper_map.scale
        return _normalised(taken, self.action_normaliser)

    def _turned(self, camera: Camera, image: np.ndarray) -> np.ndarray:
        turned = np.rot90(image, TURNS[camera.rotation], axes=(1, 2)) if image.ndim == 4 else image
        if turned.ndim != 4 or turned.shape[1:3] != (camera.height, camera.width):
            raise BadEmbodiment("camera {} gives {} after {} degrees, not [n, {}, {}, 3]".format(
                camera.name, list(turned.shape), camera.rotation, camera.height, camera.width))
        return np.ascontiguousarray(turned)

    def _part(self, observations: Mapping[str, np.ndarray], part: Field) -> np.ndarray:
        array = _array(observations, part.name)
        flat = array.reshape(len(array), -1)
        if flat.shape[1] != part.size:
            raise BadEmbodiment("state field {} has {} numbers, not {}".format(part.name, flat.shape[1], part.size))
        return flat.astype(np.float32)

    def _check_actions(self, actions: np.ndarray) -> None:
        if actions.shape[-1] != self.action_size:
            raise BadEmbodiment("an action has {} numbers, {} has {}".format(
                actions.shape[-1], self.name, self.action_size))

    def _gripper_slice(self) -> slice:
        begin = 0
        for part in self.action:
            if part.name == self.gripper:
                return slice(begin, begin + part.size)
            begin += part.size
        return slice(0, 0)


def difference(ours: EmbodimentMap, theirs: EmbodimentMap) -> str:
    """One line that names the first field in which two maps differ, ours first; empty if they are the same."""
    return _difference("", ours.plain(), theirs.plain())


def _difference(where: str, ours: Any, theirs: Any) -> str:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours:
            found = _difference("{}.{}".format(where, key) if where else key, ours[key], theirs.get(key))
            if found:
                return found
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs)):
            found = _difference("{}[{}]".format(where, index), one, other)
            if found:
                return found
    elif ours != theirs:
        return "{} is {} here and {} there".format(where, _shown(ours), _shown(theirs))
    return ""


def _shown(value: Any) -> str:
    """Short: lists of things with a name as their names."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "[{}]".format(", ".join(str(item.get("name", item)) for item in value))
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _read(name: str, value: Any) -> Any:
    """A field of the map from its plain form."""
    if name == "cameras":
        return tuple(Camera(**item) for item in value)
    if name in ("state", "action"):
        return tuple(Field(**item) for item in value)
    if name == "gripper_map":
        return Affine(**value)
    if name.endswith("_normaliser"):
        return Normaliser(**value)
    if name not in {part.name for part in fields(EmbodimentMap)}:
        raise BadEmbodiment("an embodiment has no `{}`".format(name))
    return value


def _array(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise BadEmbodiment("there is no `{}` among {}".format(name, sorted(arrays)))
    return arrays[name]


def _split(joined: np.ndarray, parts: Tuple[Field, ...]) -> Dict[str, np.ndarray]:
    ends = np.cumsum([part.size for part in parts])
    pieces: List[np.ndarray] = np.split(joined, ends[:-1], axis=-1)
    return {part.name: piece for part, piece in zip(parts, pieces)}


def _normalised(array: np.ndarray, normaliser: Normaliser) -> np.ndarray:
    if not normaliser.mean:
        return array.astype(np.float32)
    mean, std = np.asarray(normaliser.mean), np.maximum(np.asarray(normaliser.std), SMALLEST_STD)
    return ((array - mean) / std).astype(np.float32)


def _restored(array: np.ndarray, normaliser: Normaliser) -> np.ndarray:
    if not normaliser.mean:
        return array.astype(np.float32)
    mean, std = np.asarray(normaliser.mean), np.maximum(np.asarray(normaliser.std), SMALLEST_STD)
    return (array * std + mean).astype(np.float32)
