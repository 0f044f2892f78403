"""One world of LIBERO, and LIBERO's environment of one task."""

from __future__ import annotations

import gc
from collections import OrderedDict
from typing import Any, Dict, NamedTuple, Optional, Tuple

import numpy as np

from ..contract import BY_SEED, FAILURE, SUCCESS, Environment, NoExpert, WorkUnit
from ..rotations import quaternion_to_axis_angle
from .expert import Hand, PickAndPlace
from .library import Library, quiet
from .options import CAMERAS, Options

CONTROL_HZ = 20
HOLD_STILL = np.array([0, 0, 0, 0, 0, 0, -1], np.float64)
"""With the gripper open. Things fall a little in an initial state; OpenVLA waits 10 of these."""
PLACEMENTS = 50
"""Tries to place all things without a collision. LIBERO's own loop has no end, and hides every other error."""
KEPT_OF_MODEL = ("body_pos", "body_quat", "site_rgba", "geom_rgba")
"""What a reset or an episode may change in a model, which is not made anew."""
GRID = np.stack(np.meshgrid(*[np.linspace(-1, 1, 5)] * 3), axis=-1).reshape(-1, 3)
"""[125, 3] points of a box."""


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
