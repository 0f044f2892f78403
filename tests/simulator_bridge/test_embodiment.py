from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cosmos_actor.bus.schema import decode, encode
from cosmos_actor.simulator_bridge.contract import ActionSpec, Description
from cosmos_actor.simulator_bridge.embodiment import (
    Affine,
    BadEmbodiment,
    Camera,
    EmbodimentMap,
    Field,
    Normaliser,
    difference,
)
from cosmos_actor.simulator_bridge.messages import Attach

ARM = EmbodimentMap(
    name="panda",
    cameras=(Camera("wrist", 4, 6, rotation=90), Camera("agent", 5, 5, rotation=180)),
    state=(Field("position", 3), Field("gripper", 2)),
    action=(Field("move", 3), Field("gripper", 1)),
    action_frame="tool",
    gripper="gripper",
    gripper_map=Affine(-2, 1),
    state_normaliser=Normaliser((1, 2, 3, 0, 0), (2, 2, 2, 1, 0)),
    action_normaliser=Normaliser((0.0, 0.0, 0.5, 0.0), (1.0, 0.5, 0.25, 1.0)),
    control_hz=20,
)


def observed(n: int = 2) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "agent": random.integers(0, 256, (n, 5, 5, 3), np.uint8),
        "wrist": random.integers(0, 256, (n, 6, 4, 3), np.uint8),
        "gripper": np.zeros((n, 2), np.float32),
        "position": random.normal(size=(n, 3)).astype(np.float32),
    }


def test_pictures_are_turned_and_the_state_is_joined_in_its_order_and_normalised() -> None:
    given = observed()
    seen = ARM.to_policy(given)
    assert list(seen) == ["wrist", "agent", "state"]
    assert seen["wrist"].shape == (2, 4, 6, 3)
    assert (seen["wrist"][:, -1, 0] == given["wrist"][:, 0, 0]).all()  # counter-clockwise: its top left is bottom left
    assert (seen["agent"] == given["agent"][:, ::-1, ::-1]).all()
    assert seen["state"].shape == (2, 5) and seen["state"].dtype == np.float32
    assert np.allclose(seen["state"][:, :3], (given["position"] - [1, 2, 3]) / 2)


def test_what_the_policy_sees_can_be_turned_back() -> None:
    given = observed()
    back = ARM.from_policy(ARM.to_policy(given))
    assert set(back) == set(given)
    assert (back["agent"] == given["agent"]).all() and (back["wrist"] == given["wrist"]).all()
    assert np.allclose(back["position"], given["position"], atol=1e-6)


@pytest.mark.parametrize(("policy", "simulator"), [(0.0, 1.0), (1.0, -1.0), (0.5, 0.0)])
def test_the_gripper_has_the_simulators_sign_and_range(policy: float, simulator: float) -> None:
    action = ARM.to_simulator(np.array([[0.0, 2.0, 2.0, policy]], np.float32))
    assert np.allclose(action, [[0.0, 1.0, 1.0, simulator]])


@pytest.mark.parametrize("shape", [(3, 4), (3, 7, 4)])
def test_actions_go_there_and_back(shape: tuple[int, ...]) -> None:
    actions = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    kept = actions.copy()
    assert np.allclose(ARM.to_policy_actions(ARM.to_simulator(actions)), actions, atol=1e-5)
    assert (actions == kept).all()


def test_a_number_without_spread_stays_finite() -> None:
    given = observed()
    assert np.isfinite(ARM.to_policy(given)["state"]).all()


def test_a_map_is_the_same_after_it_travelled() -> None:
    offer = Attach("s", 1, Description("k:i", [], {}, ActionSpec("box")), ARM.plain())
    travelled = EmbodimentMap.from_plain(decode(*encode(offer)).embodiment)
    assert travelled == ARM and travelled.digest == ARM.digest
    assert EmbodimentMap.from_plain(json.loads(json.dumps(ARM.plain()))) == ARM


def test_equal_maps_have_one_digest_however_they_were_written() -> None:
    assert replace(ARM, control_hz=20.0, gripper_map=Affine(-2.0, 1.0)).digest == ARM.digest
    assert replace(ARM, state=list(ARM.state)).digest == ARM.digest  # type: ignore[arg-type]
    assert len(ARM.digest) == 64
    # On every Python and numpy: two hosts compare it.
    assert EmbodimentMap("x").digest == "a581df03dda56e21935f7a2fdd1bdea2f63741de474726e63414b718ca3ece96"


@pytest.mark.parametrize(("change", "line"), [
    ({}, ""),
    ({"name": "ur5"}, 'name is "panda" here and "ur5" there'),
    ({"cameras": (ARM.cameras[0], replace(ARM.cameras[1], rotation=0))},
     "cameras[1].rotation is 180 here and 0 there"),
    ({"cameras": ARM.cameras[::-1]}, 'cameras[0].name is "wrist" here and "agent" there'),
    ({"cameras": ARM.cameras[:1]}, "cameras is [wrist, agent] here and [wrist] there"),
    ({"gripper_map": Affine(2, -1)}, "gripper_map.scale is -2.0 here and 2.0 there"),
    ({"action_frame": "base", "control_hz": 10}, 'action_frame is "tool" here and "base" there'),
    ({"control_hz": 10}, "control_hz is 20.0 here and 10.0 there"),
    ({"state_normaliser": Normaliser((1, 2, 3, 0, 0), (2, 2, 2.5, 1, 0))},
     "state_normaliser.std[2] is 2.0 here and 2.5 there"),
])
def test_the_first_field_that_differs_is_named(change: dict[str, Any], line: str) -> None:
    other = replace(ARM, **change)
    assert difference(ARM, other) == line
    assert (other.digest == ARM.digest) == (line == "")


@pytest.mark.parametrize(("change", "words"), [
    ({"cameras": (Camera("wrist", 4, 6, rotation=45),)}, "cameras.wrist.rotation is 45, not 0, 90, 180 or 270"),
    ({"state_normaliser": Normaliser((1.0,), (1.0,))}, "state_normaliser has 1 means and 1 stds for 5 numbers"),
    ({"state_normaliser": Normaliser((1, 2, 3, 0, 0), ())}, "5 means and 0 stds"),
    ({"gripper": "hand"}, "gripper hand is no field of the action"),
    ({"gripper_map": Affine(0.0, 1.0)}, "gripper_map.scale is 0"),
])
def test_a_map_that_contradicts_itself_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadEmbodiment) as refused:
        replace(ARM, **change)
    assert words in str(refused.value)


@pytest.mark.parametrize(("plain", "words"), [
    (None, "this is no embodiment"), ({}, "this is no embodiment"),
    ({"name": "x", "cameras": [{"name": "a"}]}, "no embodiment"), ({"name": "x", "state": 5}, "no embodiment"),
    ({"name": "x", "colour": 1}, "an embodiment has no `colour`"),
])
def test_what_is_no_map_is_refused(plain: Any, words: str) -> None:
    with pytest.raises(BadEmbodiment) as refused:
        EmbodimentMap.from_plain(plain)
    assert words in str(refused.value)


@pytest.mark.parametrize(("change", "words"), [
    ({"agent": None}, "there is no `agent` among ['gripper', 'position', 'wrist']"),
    ({"agent": np.zeros((2, 5, 6, 3), np.uint8)},
     "camera agent gives [2, 5, 6, 3] after 180 degrees, not [n, 5, 5, 3]"),
    ({"position": np.zeros((2, 4), np.float32)}, "state field position has 4 numbers, not 3"),
])
def test_observations_of_another_body_are_named(change: dict[str, Any], words: str) -> None:
    given = {name: value for name, value in {**observed(), **change}.items() if value is not None}
    with pytest.raises(BadEmbodiment) as refused:
        ARM.to_policy(given)
    assert words in str(refused.value)


def test_actions_of_another_body_are_named() -> None:
    with pytest.raises(BadEmbodiment, match="an action has 7 numbers, panda has 4"):
        ARM.to_simulator(np.zeros((1, 7), np.float32))
