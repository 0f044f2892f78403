"""A scripted expert for LIBERO's tasks of one object that is put into or onto another. Pure: poses in, actions out.

    above ──> down ──> close ──> lift ──> over the goal ──> lower ──> open ──> away ──> over, and the task is not done
                                   └── it is not in the hand ──────────────────────────> over

Metres, radians, the axes of the robot's base; the hand's fingers close along its x axis. Every phase ends by itself
after a number of actions, so noise on them delays it and stops it nowhere.
"""

from __future__ import annotations

from typing import List, NamedTuple, Tuple

import numpy as np

from ..rotations import axis_angle_to_quaternion, matrix_to_axis_angle, quaternion_to_matrix

OPEN, CLOSED = -1.0, 1.0
"""LIBERO's gripper."""
STEP_M, STEP_RAD = 0.05, 0.5
"""What an action of 1 asks of the controller (robosuite's OSC_POSE)."""
GAIN = 1.5
"""Times the way that is left. The controller covers about two thirds of what it is asked in one of its steps."""
WIDEST_M = 0.066
"""What is held between the fingers, which open to 80 mm; wider things are held by their rim."""
CLEARANCE_M = 0.09
"""Between a thing's top and the hand's point above it."""
CARRIED_M = 0.05
"""Between the lowest point of what is carried and the goal's top."""
DEPTH_M = 0.028
"""How far below a thing's top it is held, if it is so high."""
RIM_DEPTH_M = 0.025
"""The same for a rim."""
WALL_M = 0.006
"""From the outside of a rim to the middle of its wall."""
LIFTED_M = 0.02
"""A thing that rose less than this when the hand did is not in it."""
NEAR_M, NEAR_RAD = 0.006, 0.06
FAR_M = 0.015
"""Where nothing is touched, this near is near enough."""
PHASES = ("above", "down", "close", "lift", "over", "lower", "open", "away")
LONGEST = {"above": 45, "down": 30, "close": 15, "lift": 25, "over": 60, "lower": 20, "open": 6, "away": 15}
"""Actions of each phase."""


class Hand(NamedTuple):
    position: np.ndarray
    """[3] of the point between the finger tips."""
    matrix: np.ndarray
    """[3, 3]"""


class Grasp(NamedTuple):
    """How one thing is held."""

    offset: np.ndarray
    """[3] from the thing's origin to the hand's point."""
    turn: float
    """Radians about the vertical by which the hand is turned first."""


class PickAndPlace:
    """One try. `act` is asked once an action; where `over`, it has failed and another is to be made."""

    def __init__(self, hand: Hand, thing: np.ndarray, points: np.ndarray, goal: np.ndarray, goal_top: float) -> None:
        """`thing` [3] where it is, `points` [P, 3] of its surface, `goal` [3] where its middle is to be, `goal_top` the
        height above which it is free."""
        self._goal, self._goal_top = goal, goal_top
        self._points = points - thing
        self._middle = (self._points.min(axis=0) + self._points.max(axis=0)) / 2
        grasp = grasp_of(self._points, hand.matrix[:2, 0])
        turned = quaternion_to_matrix(axis_angle_to_quaternion(np.array([0.0, 0.0, grasp.turn])))
        self._offset, self._wanted = grasp.offset, turned @ upright(hand.matrix)
        self._at, self._waited, self._origin, self._stays = 0, 0, thing, hand.position
        self.over = False

    def act(self, hand: Hand, thing: np.ndarray) -> np.ndarray:
        """[7] float32 for the hand and the thing as they are now."""
        while not self.over and self._phase_is_over(hand, thing):
            self._next(hand, thing)
        self._waited += 1
        target, gripper = self._target(thing)
        action = np.empty(7, np.float32)
        action[:3] = GAIN * (target - hand.position) / STEP_M
        action[3:6] = GAIN * self._rotation_left(hand) / STEP_RAD
        action[6] = gripper
        return np.clip(action, -1.0, 1.0)

    # ---- phases

    def _next(self, hand: Hand, thing: np.ndarray) -> None:
        if PHASES[self._at] == "away" or PHASES[self._at] == "lift" and thing[2] - self._origin[2] < LIFTED_M:
            self.over = True
            return
        self._at, self._waited = self._at + 1, 0
        if PHASES[self._at] in ("close", "lift", "open", "away"):
            self._origin, self._stays = thing, hand.position
        if PHASES[self._at] == "over":
            self._offset = hand.position - thing  # as it lies in the hand

    def _phase_is_over(self, hand: Hand, thing: np.ndarray) -> bool:
        phase = PHASES[self._at]
        if self._waited >= LONGEST[phase]:
            return True
        if phase in ("close", "open"):
            return False
        near = FAR_M if phase in ("lift", "over") else NEAR_M
        away = np.abs(self._target(thing)[0] - hand.position).max()
        return bool(away < near and np.abs(self._rotation_left(hand)).max() < NEAR_RAD)

    def _target(self, thing: np.ndarray) -> Tuple[np.ndarray, float]:
        """(where the hand is to be, what the gripper is to do)"""
        phase, top = PHASES[self._at], self._points[:, 2].max()
        if phase in ("above", "down"):
            up = max(0.0, top - self._offset[2]) + CLEARANCE_M if phase == "above" else 0.0
            return thing + self._offset + [0.0, 0.0, up], OPEN
        if phase == "close":
            return self._stays, CLOSED
        if phase == "lift":
            return np.array([*self._stays[:2], self._height() + self._offset[2]]), CLOSED
        over = self._goal - self._middle + self._offset
        if phase == "over":
            return np.array([*over[:2], self._height() + self._offset[2]]), CLOSED
        if phase == "lower":
            lowest = self._goal[2] - self._points[:, 2].min() + self._offset[2]
            return np.array([*over[:2], max(over[2], lowest)]), CLOSED
        if phase == "open":
            return self._stays, OPEN
        return self._stays + [0.0, 0.0, CLEARANCE_M], OPEN

    def _height(self) -> float:
        """Of the thing's origin while it is carried."""
        return float(self._goal_top + CARRIED_M - self._points[:, 2].min())

    def _rotation_left(self, hand: Hand) -> np.ndarray:
        return matrix_to_axis_angle(self._wanted @ hand.matrix.T)


def upright(matrix: np.ndarray) -> np.ndarray:
    """[3, 3]: the same hand, pointing straight down."""
    x = np.array([matrix[0, 0], matrix[1, 0], 0.0])
    x /= np.linalg.norm(x)
    z = np.array([0.0, 0.0, -1.0])
    return np.stack([x, np.cross(z, x), z], axis=1)


def grasp_of(points: np.ndarray, closing: np.ndarray) -> Grasp:
    """Of `points` [P, 3] about a thing's origin by a hand that closes along `closing` [2]: the least turn with which it
    fits between the fingers, or else its rim."""
    turns: List[float] = sorted(np.deg2rad(np.arange(-80, 91, 10)), key=abs)
    low, high = points.min(axis=0), points.max(axis=0)
    depth = min(DEPTH_M, (high[2] - low[2]) / 2)
    held = points[np.abs(points[:, 2] - (high[2] - depth)) < max(DEPTH_M, depth)]
    for turn in turns:
        axis = turned_by(closing, turn)
        along = held[:, :2] @ axis
        if np.ptp(along) <= WIDEST_M:
            across = held[:, :2] @ np.array([-axis[1], axis[0]])
            middle = np.ptp(along) / 2 + along.min(), np.ptp(across) / 2 + across.min()
            at = middle[0] * axis + middle[1] * np.array([-axis[1], axis[0]])
            return Grasp(np.array([*at, high[2] - depth]), turn)
    depth = min(RIM_DEPTH_M, (high[2] - low[2]) / 2)
    wall = points[points[:, 2] > high[2] - depth][:, :2] @ closing
    return Grasp(np.array([*((wall.max() - WALL_M) * closing), high[2] - depth]), 0.0)


def turned_by(direction: np.ndarray, angle: float) -> np.ndarray:
    """[2]"""
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([cosine * direction[0] - sine * direction[1], sine * direction[0] + cosine * direction[1]])
