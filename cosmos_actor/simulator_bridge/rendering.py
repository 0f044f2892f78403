"""How MuJoCo draws where there is no screen."""

from __future__ import annotations

import os
import sys


def choose_renderer() -> None:
    """By EGL with an NVIDIA GPU, otherwise by OSMesa on the CPU; MUJOCO_GL overrules that. MuJoCo looks when it is
    imported."""
    os.environ.setdefault("MUJOCO_GL", "egl" if os.path.exists("/dev/nvidiactl") else "osmesa")


def has_a_screen() -> bool:
    """By which MuJoCo's own choice, GLFW, can draw."""
    return not sys.platform.startswith("linux") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
