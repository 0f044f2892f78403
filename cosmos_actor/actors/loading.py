"""Objects named in settings as package.module:name."""

from __future__ import annotations

import importlib
from typing import Any

from cosmos_actor.actors.errors import NotFound


def load_object(path: str, *, setting: str) -> Any:
    """The object at `package.module:name`. Raises NotFound naming the path, what failed and the setting."""
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise NotFound(f"{path} can not be loaded: {error}", setting=setting) from error
