"""Packages that only some commands need."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .mistakes import Mistake


def needed(module: str, extra: str = "record") -> Any:
    """The module. Raises Mistake with what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Mistake("{} is not installed in {}: pip install 'cosmos-actor[{}]'".format(
            error.name, sys.executable, extra)) from error
    except ImportError as error:  # such as a pyarrow that wants another numpy than the simulator has
        raise Mistake("{} can not be used in {}: {}".format(module, sys.executable, error)) from error
