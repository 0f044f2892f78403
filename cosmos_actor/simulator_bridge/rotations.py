"""Rotations as simulators have them and as policies learn them. Pure.

Quaternions are [w, x, y, z]. An axis-angle is the axis times the angle in radians. `rot6d` is the first two columns of
the rotation matrix, [a1, a2, a3, b1, b2, b3]: without the jumps that a network can not learn (Zhou et al. 2019, "On the
continuity of rotation representations").
"""

from __future__ import annotations

import numpy as np

SMALLEST_SINE = 1e-8
"""Of half an angle. Below it the axis is noise, and twice the vector part is the axis-angle to the last bit."""


def xyzw_to_wxyz(quaternions: np.ndarray) -> np.ndarray:
    """[…, 4] as robosuite has them -> […, 4] as everything here."""
    return np.roll(quaternions, 1, axis=-1)


def quaternion_to_axis_angle(quaternions: np.ndarray) -> np.ndarray:
    """[…, 4] -> […, 3]. Of any length but zero; the angle is in [0, 2π], at most π where w >= 0.

    q and -q, one rotation, give two answers: whoever follows a quaternion that moves without jumps, as MuJoCo's do,
    gets an axis-angle without jumps at half a turn, which is where a hand that points down is.
    """
    unit = quaternions / np.linalg.norm(quaternions, axis=-1, keepdims=True)
    sine = np.linalg.norm(unit[..., 1:], axis=-1, keepdims=True)
    angle = 2 * np.arctan2(sine, unit[..., :1])
    scale = np.where(sine > SMALLEST_SINE, angle / np.maximum(sine, SMALLEST_SINE), 2.0)
    return scale * unit[..., 1:]


def axis_angle_to_quaternion(axis_angles: np.ndarray) -> np.ndarray:
    """[…, 3] -> […, 4] of length 1, with w >= 0 for angles up to π."""
    half = np.linalg.norm(axis_angles, axis=-1, keepdims=True) / 2
    scale = np.sinc(half / np.pi) / 2  # sin(half) / (2 half), 1/2 at zero
    return np.concatenate([np.cos(half), scale * axis_angles], axis=-1)


def quaternion_to_rot6d(quaternions: np.ndarray) -> np.ndarray:
    """[…, 4] -> […, 6]. Of any length but zero; q and -q give the same."""
    w, x, y, z = np.moveaxis(quaternions / np.linalg.norm(quaternions, axis=-1, keepdims=True), -1, 0)
    return np.stack([
        1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y),
        2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x),
    ], axis=-1)


def quaternion_to_matrix(quaternions: np.ndarray) -> np.ndarray:
    """[…, 4] -> […, 3, 3]. Of any length but zero."""
    return rot6d_to_matrix(quaternion_to_rot6d(quaternions))


def matrix_to_axis_angle(matrix: np.ndarray) -> np.ndarray:
    """[…, 3, 3] -> […, 3] at most π long."""
    return quaternion_to_axis_angle(matrix_to_quaternion(matrix))


def rot6d_to_matrix(rot6d: np.ndarray) -> np.ndarray:
    """[…, 6] -> […, 3, 3], a rotation also where a network's two columns are neither of length 1 nor at right angles.

    Gram-Schmidt, Zhou et al. 2019, equation 13.
    """
    a, b = rot6d[..., :3], rot6d[..., 3:]
    first = a / np.linalg.norm(a, axis=-1, keepdims=True)
    second = b - np.sum(first * b, axis=-1, keepdims=True) * first
    second = second / np.linalg.norm(second, axis=-1, keepdims=True)
    return np.stack([first, second, np.cross(first, second)], axis=-1)


def rot6d_to_quaternion(rot6d: np.ndarray) -> np.ndarray:
    """[…, 6] -> […, 4] of length 1 with w >= 0."""
    return matrix_to_quaternion(rot6d_to_matrix(rot6d))


def matrix_to_quaternion(matrix: np.ndarray) -> np.ndarray:
    """[…, 3, 3] -> […, 4] of length 1 with w >= 0."""
    m = {(i, j): matrix[..., i, j] for i in range(3) for j in range(3)}
    # Four ways to the same quaternion, each exact where its own component is large (Shepperd 1978).
    ways = np.stack([
        np.stack([1 + m[0, 0] + m[1, 1] + m[2, 2], m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1]], -1),
        np.stack([m[2, 1] - m[1, 2], 1 + m[0, 0] - m[1, 1] - m[2, 2], m[0, 1] + m[1, 0], m[0, 2] + m[2, 0]], -1),
        np.stack([m[0, 2] - m[2, 0], m[0, 1] + m[1, 0], 1 - m[0, 0] + m[1, 1] - m[2, 2], m[1, 2] + m[2, 1]], -1),
        np.stack([m[1, 0] - m[0, 1], m[0, 2] + m[2, 0], m[1, 2] + m[2, 1], 1 - m[0, 0] - m[1, 1] + m[2, 2]], -1),
    ], axis=-2)
    best = np.argmax(np.diagonal(ways, axis1=-2, axis2=-1), axis=-1)
    chosen = np.take_along_axis(ways, best[..., None, None], axis=-2)[..., 0, :]
    chosen = chosen / np.linalg.norm(chosen, axis=-1, keepdims=True)
    return np.where(chosen[..., :1] < 0, -chosen, chosen)
