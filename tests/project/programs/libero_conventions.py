"""Run in LIBERO's environment: what the adapter says of LIBERO against LIBERO itself. Prints a line of JSON."""

import contextlib
import gc
import json
import sys
import weakref
from typing import Any

import numpy as np

from cosmos_actor.simulator_bridge.contract import WorkUnit
from cosmos_actor.simulator_bridge.plugins import SimulatorName, load

SIZE, SEED, STATE, SETTLE, STEPS = 64, 5, 3, 10, 6


def ours(shadows: str, tasks: str = "0", more: str = "") -> Any:
    return load(SimulatorName.parse(f"libero:libero_object?tasks={tasks}&size={SIZE}&shadows={shadows}{more}"))


def play(world: Any, task: str, actions: Any) -> list[dict[str, Any]]:
    world.reset(WorkUnit("u", task, SEED, STATE))
    seen = [world.observe()]
    for action in actions:
        world.step(action)
        seen.append(world.observe())
    return [{name: np.copy(array) for name, array in one.items()} for one in seen]


def theirs(actions: Any) -> list[dict[str, Any]]:
    """As OpenVLA evaluates, with LIBERO's own slow reset. A picture of now: LIBERO's own is one of 2 ms before."""
    from libero.libero.benchmark import get_benchmark
    from libero.libero.envs import OffScreenRenderEnv
    from robosuite.utils.transform_utils import quat2axisangle

    suite = get_benchmark("libero_object")()
    env = OffScreenRenderEnv(bddl_file_name=suite.get_task_bddl_file_path(0), camera_heights=SIZE, camera_widths=SIZE)
    env.seed(SEED)
    env.reset()
    env.set_init_state(suite.get_task_init_states(0)[STATE])
    seen = []

    def look() -> None:
        raw = env.env._get_observations(force_update=True)
        state = [raw["robot0_eef_pos"], quat2axisangle(raw["robot0_eef_quat"].copy()), raw["robot0_gripper_qpos"]]
        seen.append({"agent": raw["agentview_image"][::-1, ::-1], "wrist": raw["robot0_eye_in_hand_image"][::-1, ::-1],
                     "state": np.concatenate(state).astype(np.float32)})

    for _ in range(SETTLE):
        env.step([0, 0, 0, 0, 0, 0, -1])
    look()
    for action in actions:
        env.step(action)
        look()
    env.close()
    return seen


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, float]:
    return {name: max(float(np.abs(a[name].astype(float) - b[name]).max()) for a, b in zip(one, other, strict=True))
            for name in one[0]}


def fingers(world: Any, task: str, gripper: float) -> float:
    """How far they are apart after some actions of a policy's gripper, [0, 1]."""
    body = ours("false").embodiment
    world.reset(WorkUnit("u", task, SEED, STATE))
    for _ in range(15):
        world.step(body.to_simulator(np.array([[0, 0, 0, 0, 0, 0, gripper]], np.float32))[0])
    state = world.observe()["state"]
    return float(state[6] - state[7])


def expert_steps(world: Any, task: str) -> int:
    """Until the task is done; 0: it was not."""
    world.reset(WorkUnit("u", task, 0, 0))
    for step in range(280):
        if world.step(world.expert())[1]:
            return step + 1
    return 0


def look_at_all() -> dict[str, Any]:
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, 7)).astype(np.float32)
    simulator = ours("true")
    (task,) = simulator.describe().tasks
    world = simulator.world()
    first = play(world, task.name, actions)
    found: dict[str, Any] = {
        "raw": differences(first, theirs(actions)), "instruction": task.instruction,
        "initial_states": task.initial_states, "fingers_open": fingers(world, task.name, 1.0),
        "fingers_closed": fingers(world, task.name, 0.0), "again": differences(first, play(world, task.name, actions))}
    world.close()

    simulator = ours("false", tasks="0,3", more="&keep=1&cameras=")
    one, other = (task.name for task in simulator.describe().tasks)
    world = simulator.world()
    found["expert_steps"] = expert_steps(world, other)
    before = weakref.ref(world._open._env.sim)
    world.reset(WorkUnit("u", one, 0, 0))
    gc.collect()
    found["closed_the_other_task"] = before() is None
    world.close()
    return found


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        answer = look_at_all()
    print(json.dumps(answer))
