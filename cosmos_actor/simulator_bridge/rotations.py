"""Rotations as simulators have them and as policies learn them. Pure.

Quaternions are [w, x, y, z]. `rot6d` is the first two columns of the rotation matrix, [a1, a2, a3, b1, b2, b3]: without
the jumps that a network can not learn (Zhou et al. 2019, "On the continuity of rotation representations").
"""

from __future__ import annotations

import numpy as np


def quaternion_to_rot6d(quaternions: np.ndarray) -> np.ndarray:
    """[…, 4] -> […, 6]. Of any length but zero; q and -q give the same."""
    w, x, y, z = np.moveaxis(quaternions / np.linalg.norm(quaternions, axis=-1, keepdims=True), -1, 0)
    return np.stack([
        1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y),
        2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x),
    ], axis=-1)


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
    matrix = rot6d_to_matrix(rot6d)
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
