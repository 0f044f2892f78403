from __future__ import annotations

import numpy as np

from cosmos_actor.simulator_bridge.rotations import (
    axis_angle_to_quaternion,
    matrix_to_axis_angle,
    quaternion_to_axis_angle,
    quaternion_to_matrix,
    quaternion_to_rot6d,
    rot6d_to_matrix,
    rot6d_to_quaternion,
    xyzw_to_wxyz,
)


def quaternions() -> np.ndarray:
    """Random ones, the turns about each axis by a half, and none at all."""
    random = np.random.default_rng(2).normal(size=(500, 4))
    made = np.concatenate([random, np.eye(4), [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, -1]]])
    made = made / np.linalg.norm(made, axis=1, keepdims=True)
    return np.where(made[:, :1] < 0, -made, made)


def test_quaternions_come_back_from_rot6d() -> None:
    given = quaternions()
    back = rot6d_to_quaternion(quaternion_to_rot6d(given))
    same = np.abs(np.sum(given * back, axis=1))  # q and -q are one rotation
    assert np.allclose(same, 1.0, atol=1e-12)
    assert (back[:, 0] >= 0).all()


def test_a_quarter_turn_about_z_is_what_it_is() -> None:
    turn = np.array([np.sqrt(0.5), 0, 0, np.sqrt(0.5)])
    assert np.allclose(quaternion_to_rot6d(turn), [0, 1, 0, -1, 0, 0])
    assert np.allclose(rot6d_to_matrix(quaternion_to_rot6d(turn)), [[0, -1, 0], [1, 0, 0], [0, 0, 1]])


def test_what_a_network_says_is_made_a_rotation() -> None:
    said = np.random.default_rng(3).normal(size=(100, 2, 6))
    matrix = rot6d_to_matrix(said)
    assert np.allclose(matrix @ np.swapaxes(matrix, -1, -2), np.eye(3), atol=1e-9)
    assert np.allclose(np.linalg.det(matrix), 1.0)
    assert np.allclose(quaternion_to_rot6d(rot6d_to_quaternion(said)), np.concatenate(
        [matrix[..., 0], matrix[..., 1]], axis=-1))


def test_an_axis_angle_comes_back_from_its_quaternion() -> None:
    random = np.random.default_rng(4)
    axis = random.normal(size=(500, 3))
    axis /= np.linalg.norm(axis, axis=1, keepdims=True)
    for longest in (1e-9, 1e-4, np.pi):
        given = axis * random.uniform(0, longest, (500, 1))
        assert np.allclose(quaternion_to_axis_angle(axis_angle_to_quaternion(given)), given, rtol=0, atol=1e-12)
    assert quaternion_to_axis_angle(np.array([1.0, 0, 0, 0])).tolist() == [0, 0, 0]


def test_an_axis_angle_has_no_jump_at_half_a_turn() -> None:
    angles = np.linspace(np.pi - 0.1, np.pi + 0.1, 201)
    none = np.zeros_like(angles)
    turned = quaternion_to_axis_angle(np.stack([np.cos(angles / 2), np.sin(angles / 2), none, none], axis=1))
    assert np.allclose(turned[:, 0], angles)


def test_matrices_and_quaternions_and_axis_angles_agree() -> None:
    given = quaternions()
    matrix = quaternion_to_matrix(given)
    assert np.allclose(matrix @ np.array([1.0, 0, 0]), quaternion_to_rot6d(given)[..., :3])
    back = axis_angle_to_quaternion(matrix_to_axis_angle(matrix))
    assert np.allclose(np.abs(np.sum(given * back, axis=1)), 1.0)
    assert (xyzw_to_wxyz(np.array([1, 2, 3, 4])) == [4, 1, 2, 3]).all()
