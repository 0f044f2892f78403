"""Any environment of gymnasium 0.29 or 1.x by its ID; `MODULE:ID` imports MODULE first, as gymnasium itself does.

Observations: a Box or Discrete space is `state`, or `image` if it is uint8 with three dims; the members of a Dict or
Tuple keep their names (`outer.inner`); texts are left out; float64 travels as float32. With `?render_mode=rgb_array`
there is `image` from `render()`, unless the environment has pixels of its own. Actions: Discrete, or a Box of floats.
Success: `is_success` or `success` of the last step's info, where there is one.

`?wrappers=MODULE:NAME,MODULE:NAME(KEY=VALUE)` puts these around each environment, the first one innermost.

`?fresh=true` makes the environment anew for each episode: for one that does not forget the last one at its reset. A
BipedalWalker does not, so that is its default.

Meta-World brings experts, of single tasks without wrappers: `Meta-World/MT1?env_name=reach-v3` has one.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from importlib import metadata
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .contract import (
    BOX,
    DISCRETE,
    FAILURE,
    SUCCESS,
    UNKNOWN,
    ActionSpec,
    ArraySpec,
    Description,
    Environment,
    NoExpert,
    SimSession,
    Simulator,
    TaskSpec,
    WorkUnit,
)
from .mistakes import Mistake
from .plugins import parse_options
from .rendering import choose_renderer, has_a_screen
from .slots import EachSlot

KIND = "gymnasium"
MAX_ENVS = 1024
"""In one process, one after another: beyond it more processes are quicker."""
MODULES = {
    "ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid", "Meta-World/": "metaworld",
    **dict.fromkeys(["FetchReach", "FetchPush", "FetchSlide", "FetchPickAndPlace", "HandReach", "HandManipulate",
                     "AdroitHand", "PointMaze_", "AntMaze_", "FrankaKitchen-"], "gymnasium_robotics"),
}
"""How IDs begin that are registered when this module is imported."""
REMEMBERS = ("BipedalWalker",)
"""Its Box2D world is made once, and what the contacts of an episode leave in it moves the next one's bodies."""
META_WORLD = "Meta-World/"
"""It draws its goals when it is made, and one of them before `reset` hears its seed: both are seeded from here."""
SEES_THE_GOAL = ("Meta-World/MT1", "Meta-World/goal_observable")
"""Its IDs of one task whose observation has all that an expert looks at."""
WRAPPER = re.compile(r"([\w.]+):(\w+)(?:\((.*)\))?")
PEELED = ("PassiveEnvChecker", "OrderEnforcing", "TimeLimit")
"""Wrappers of `gymnasium.make` that only cost time here: order, limit and shapes are looked at by `CheckedSession`."""


class Part(NamedTuple):
    """One array of an observation."""

    name: str
    path: Tuple[Any, ...]
    """Keys that lead to it."""
    spec: ArraySpec


def make(identity: str, **options: Any) -> Simulator:
    """The simulator of this ID; `options` go to `gymnasium.make`, but for `wrappers` and `fresh`. Raises Mistake, or
    what making it raises."""
    if "render_mode" in options and not has_a_screen():
        choose_renderer()
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ModuleNotFoundError as error:
        raise Mistake("{} is not installed in {}: pip install gymnasium".format(error.name, sys.executable)) from error
    for module in modules_of(identity):
        importlib.import_module(module)
    if META_WORLD in identity:
        options = {"seed": 0, **options}
    wrappers = [wrapper_of(text) for text in split_wrappers(options.pop("wrappers", ""))]
    expert = None if wrappers else expert_of(identity, str(options.get("env_name", "")))
    fresh = options.pop("fresh", identity.rpartition(":")[2].startswith(REMEMBERS))
    if not isinstance(fresh, bool):
        raise Mistake("fresh={}: expected true or false".format(fresh))
    return GymnasiumSimulator(gymnasium, identity, options, wrappers, expert, fresh)


def modules_of(identity: str) -> List[str]:
    """What registers this ID when it is imported, by its beginning."""
    return [module for beginning, module in MODULES.items() if identity.startswith(beginning)]


def expert_of(identity: str, env_name: str) -> Optional[Callable[[], Any]]:
    """What makes the expert of this environment, which has `get_action(observation)`; None where there is none."""
    if not identity.endswith(SEES_THE_GOAL):
        return None
    experts: Dict[str, Callable[[], Any]] = getattr(importlib.import_module("metaworld.policies"), "ENV_POLICY_MAP", {})
    return experts.get(env_name)


class GymnasiumSimulator(Simulator):
    """One environment ID. A first environment is made at once, since only it knows its spaces; `open` uses it."""

    seeds_may_be_alike = True

    def __init__(self, gymnasium: Any, identity: str, options: Dict[str, Any],
                 wrappers: Sequence[Callable[[Any], Any]], expert: Optional[Callable[[], Any]], fresh: bool) -> None:
        """`expert`: see `expert_of`. `fresh`: an environment is used for one episode only."""
        self._expert, self._fresh = expert, fresh
        self._make_env = lambda: gymnasium.make(identity, disable_env_checker=True, **options)
        self._wrappers = wrappers
        made = self._make_env()
        try:
            self._spec = made.spec
            made = self._first = self._wrapped(made)
            self._parts = observation_parts(made.observation_space)
            self._action, self._convert = action_of(made.action_space)
            self._frame = rendered_frame(made) if options.get("render_mode") == "rgb_array" else None
            if self._frame is not None and any(part.name == "image" for part in self._parts):
                self._frame = None
        except BaseException:
            made.close()
            raise
        self._identity, self._version = identity, gymnasium.__version__
        self._np_random = gymnasium.utils.seeding.np_random

    def describe(self) -> Description:
        observations = {part.name: part.spec for part in self._parts}
        if self._frame is not None:
            observations["image"] = self._frame
        return Description(
            simulator="{}:{}".format(KIND, self._identity),
            tasks=[TaskSpec(self._spec.id, self._spec.max_episode_steps or 0)],
            observations=observations, action=self._action, max_envs=MAX_ENVS,
            deterministic=not self._spec.nondeterministic, control_hz=control_hz(self._first),
            libraries=self._libraries(), expert=self._expert is not None)

    def open(self, envs: int) -> SimSession:
        whole = len(self._parts) == 1 and not self._parts[0].path and self._frame is None
        return SeenWhole(self._world, envs, self._parts[0]) if whole else EachSlot(self._world, envs)

    def _world(self) -> Environment:
        env, self._first = self._first, None
        env = self._made_again() if env is None else self._eased(env)
        seed_choices = self._np_random if META_WORLD in self._identity else None
        return GymnasiumWorld(env, self._parts, self._convert, self._frame is not None, seed_choices,
                              self._expert() if self._expert is not None else None,
                              self._made_again if self._fresh else None)

    def _made_again(self) -> Any:
        env = self._eased(self._wrapped(self._make_env()))
        if self._frame is not None:
            rendered_frame(env)
        return env

    def _eased(self, env: Any) -> Any:
        if self._action.kind == DISCRETE:
            know(env.unwrapped.action_space, [self._convert(action) for action in range(self._action.n)])
        return env

    def _wrapped(self, env: Any) -> Any:
        env = peel(env)
        for wrapper in self._wrappers:
            env = wrapper(env)
        return env

    def _libraries(self) -> Dict[str, str]:
        package = self._identity.partition(":")[0] if ":" in self._identity else str(self._spec.entry_point)
        package = package.partition(":")[0].partition(".")[0].replace("_", "-")
        found = {"gymnasium": self._version, "numpy": np.__version__}
        beside = [name for name in ("mujoco", "Box2D") if name in sys.modules]
        for distribution in (package, *(name.replace("_", "-") for name in modules_of(self._identity)), *beside):
            try:
                found.setdefault(distribution, metadata.version(distribution))
            except (metadata.PackageNotFoundError, ValueError):
                pass
        return found


class GymnasiumWorld(Environment):
    """One environment."""

    def __init__(self, env: Any, parts: List[Part], convert: Callable[[Any], Any], renders: bool,
                 seed_choices: Optional[Callable[[int], Any]] = None, expert: Any = None,
                 make_again: Optional[Callable[[], Any]] = None) -> None:
        """`seed_choices` makes the generator that wrappers of the environment choose with before it is reset.
        `make_again`: makes one for each episode after the first."""
        self._env, self._convert, self._renders = env, convert, renders
        self._make_again, self._used = make_again, False
        self._wanted = [(part.name, part.path, np.dtype(part.spec.dtype)) for part in parts]
        """A dtype given as a name is looked up each time."""
        self._seed_choices, self._expert = seed_choices, expert
        self.seen: Any = None
        """The observation as the environment gave it."""
        self._info: Any = {}

    def reset(self, unit: WorkUnit) -> None:
        stdout, sys.stdout = sys.stdout, sys.stderr  # BabyAI prints how often it has drawn
        try:
            if self._used and self._make_again is not None:
                self._env.close()
                self._env = self._make_again()
            self._used = True
            if self._seed_choices is not None:
                self._env.unwrapped.np_random = self._seed_choices(unit.seed)[0]
            self.seen, self._info = self._env.reset(seed=unit.seed)
        finally:
            sys.stdout = stdout

    def step(self, action: Any) -> Tuple[float, bool, bool]:
        self.seen, reward, terminated, truncated, self._info = self._env.step(self._convert(action))
        return reward, terminated, truncated

    def observe(self) -> Dict[str, np.ndarray]:
        observation = {}
        for name, path, dtype in self._wanted:
            value = self.seen
            for key in path:
                value = value[key]
            observation[name] = np.asarray(value, dtype)
        if self._renders:
            observation["image"] = self._env.render()
        return observation

    def expert(self) -> Any:
        if self._expert is None:
            raise NoExpert
        bounds = self._env.action_space
        return np.clip(np.asarray(self._expert.get_action(self.seen), np.float32), bounds.low, bounds.high)

    def success(self) -> int:
        if not self._info:
            return UNKNOWN
        told = self._info.get("is_success", self._info.get("success"))
        return UNKNOWN if told is None else SUCCESS if told else FAILURE

    def close(self) -> None:
        self._env.close()


class SeenWhole(EachSlot):
    """Environments that show one array each: all are put together at once, in a third of the time for small ones."""

    def __init__(self, make: Callable[[], Environment], envs: int, part: Part) -> None:
        super().__init__(make, envs)
        self._name, self._dtype, self._shape = part.name, np.dtype(part.spec.dtype), part.spec.shape

    def observe(self, slots: Sequence[int]) -> Dict[str, np.ndarray]:
        worlds: Any = self._worlds
        try:
            seen = [worlds[slot].seen for slot in slots]
            if list(map(len, seen)).count(len(seen[0])) == len(seen):  # other sizes than the first's do not join at all
                return {self._name: np.asarray(np.concatenate(seen).reshape(len(seen), *self._shape), self._dtype)}
        except (AttributeError, LookupError, TypeError, ValueError):
            pass  # no arrays, of other shapes, or there is no world
        return super().observe(slots)


def peel(env: Any) -> Any:
    """Without the outermost wrappers that `gymnasium.make` has added by itself."""
    while type(env).__name__ in PEELED and type(env).__module__.startswith("gymnasium.wrappers"):
        env = env.env
    return env


def know(space: Any, actions: List[Any]) -> None:
    """A Discrete `contains` these very objects as ever, but says so at once. Many environments ask it at each step,
    which is a third of CartPole's; `CheckedSession` has looked at the whole request before."""
    if type(space).__name__ != "Discrete" or "contains" in vars(space):
        return
    contains = space.contains
    known = {id(action): action for action in actions if contains(action)}
    space.contains = lambda action: id(action) in known or contains(action)


def split_wrappers(text: str) -> List[str]:
    """At the commas that are in no parentheses."""
    return [part for part in re.split(r",(?![^(]*\))", text) if part]


def wrapper_of(text: str) -> Callable[[Any], Any]:
    """What `MODULE:NAME` or `MODULE:NAME(KEY=VALUE,…)` makes of an environment. Raises Mistake."""
    match = WRAPPER.fullmatch(text)
    if match is None:
        raise Mistake("wrapper {}: expected MODULE:NAME or MODULE:NAME(KEY=VALUE), such as "
                      "minigrid.wrappers:RGBImgObsWrapper(tile_size=8)".format(text))
    module, name, inside = match.groups()
    options = parse_options(inside.split(",") if inside else [])
    try:
        made = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise Mistake("wrapper {}: there is no module {} in {}".format(text, error.name, sys.executable)) from error
    except AttributeError as error:
        raise Mistake("wrapper {}: there is no {} in {}".format(text, name, module)) from error
    return functools.partial(made, **options)


def observation_parts(space: Any) -> List[Part]:
    """The arrays of an observation space. Raises Mistake for one that is none."""
    found = list(_parts(space, (), ""))
    if not found:
        raise Mistake("observation space {} has no arrays".format(space))
    return found


def _parts(space: Any, path: Tuple[Any, ...], name: str) -> List[Part]:
    kind = type(space).__name__
    inner = getattr(space, "spaces", None)
    if inner is not None:
        members = inner.items() if hasattr(inner, "items") else enumerate(inner)
        return [part for key, member in members
                for part in _parts(member, (*path, key), "{}.{}".format(name, key) if name else str(key))]
    if kind in ("Text", "MissionSpace") or space.dtype is None or space.shape is None:
        return []
    dtype = np.dtype(space.dtype)
    dtype = np.dtype(np.float32) if dtype == np.float64 else dtype
    if dtype.kind not in "fiub":
        return []
    shape = tuple(int(size) for size in space.shape)
    name = name or ("image" if dtype == np.uint8 and len(shape) == 3 else "state")
    return [Part(name, path, ArraySpec(dtype.name, shape))]


def action_of(space: Any) -> Tuple[ActionSpec, Callable[[Any], Any]]:
    """(what it is for the driver, how such an action becomes the environment's). Raises Mistake."""
    kind = type(space).__name__
    if kind == "Discrete":
        scalar = np.dtype(space.dtype).type  # what an environment looks at longest is an int
        table = [scalar(action) for action in range(int(space.start), int(space.start + space.n))]
        return ActionSpec(DISCRETE, n=len(table)), table.__getitem__
    if kind != "Box" or np.dtype(space.dtype).kind != "f":
        raise Mistake("action space {} is not supported: it is to be Discrete, or a Box of floats".format(space))
    low, high = (_bound(bound) for bound in (space.low, space.high))
    dtype = np.dtype(space.dtype)
    convert: Callable[[Any], Any] = _as_it_is
    if dtype != np.float32:
        convert = lambda action: action.astype(dtype)  # noqa: E731
    return ActionSpec(BOX, shape=tuple(int(size) for size in space.shape), low=low, high=high), convert


def _as_it_is(action: Any) -> Any:
    return action


def _bound(bound: np.ndarray) -> Tuple[float, ...]:
    return tuple(float(value) for value in bound.flatten()) if np.isfinite(bound).any() else ()


def rendered_frame(env: Any) -> Optional[ArraySpec]:
    """What `render()` gives. MuJoCo's free camera stays where it is put at the first picture, amid the things as they
    lie then: it stands alike in all environments when all of them draw the beginning of seed 0 first."""
    env.reset(seed=0)
    frame = np.asarray(env.render())
    return ArraySpec(frame.dtype.name, tuple(frame.shape))


def control_hz(env: Any) -> float:
    """One over the simulated seconds of a step, where the environment says them (MuJoCo's do)."""
    dt = getattr(env.unwrapped, "dt", 0.0)
    return round(1.0 / dt, 3) if isinstance(dt, (int, float)) and dt > 0 else 0.0
