"""Simulators by name.

    KIND:ID[?OPTION=VALUE[&…]]          gymnasium:CartPole-v1?render_mode=rgb_array
    python:MODULE:CALLABLE[:ID][?…]     python:my_package.worlds:make:kitchen

KIND is built in, an entry point of the group `cosmos_actor.simulators`, or `python`, which names any callable that can
be imported here, also from the current folder. The callable gets the ID and the options, and returns a Simulator. A
value is read as JSON where it is JSON (`3`, `true`, `[1, 2]`), else as text.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Callable, Dict, List, Mapping

from .contract import Simulator
from .mistakes import Mistake, one_line

GROUP = "cosmos_actor.simulators"
BUILT_IN = {
    "gymnasium": "cosmos_actor.simulator_bridge.gymnasium_adapter:make",
    "libero": "cosmos_actor.simulator_bridge.libero:make",
}
PYTHON = "python"


@dataclass(frozen=True)
class SimulatorName:
    """A name, taken apart. `str()` of it is the same for the same simulator, in whatever order its options came."""

    kind: str
    id: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, more: Mapping[str, Any] = {}) -> SimulatorName:  # noqa: B006 (never changed)
        """`more` options go before those in the text. Raises Mistake."""
        name, _, options = text.partition("?")
        kind, colon, identity = name.partition(":")
        if not (kind and colon and identity):
            raise Mistake("{}: expected KIND:ID, such as gymnasium:CartPole-v1".format(text))
        return cls(kind, identity, {**parse_options(options.split("&") if options else []), **more})

    def __str__(self) -> str:
        options = "&".join("{}={}".format(key, as_text(self.options[key])) for key in sorted(self.options))
        return "{}:{}{}".format(self.kind, self.id, "?" + options if options else "")


def parse_options(words: List[str]) -> Dict[str, Any]:
    """`key=value` of each word. Raises Mistake."""
    options: Dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key.isidentifier() and equals):
            raise Mistake("option {}: expected NAME=VALUE, such as render_mode=rgb_array".format(word or "(empty)"))
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def as_text(value: Any) -> str:
    """What `parse_options` reads back as the same."""
    return value if isinstance(value, str) and not _is_json(value) else json.dumps(value, sort_keys=True)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def load(name: SimulatorName) -> Simulator:
    """The simulator as it is installed here. Raises Mistake: no such kind, it is not installed, or it can not load."""
    found = _factory(name)
    arguments = [name.id] if name.kind != PYTHON else [name.id.partition(":")[2].partition(":")[2]]
    try:
        simulator = found(*[word for word in arguments if word], **name.options)
    except Mistake:
        raise
    except (Exception, SystemExit) as error:
        raise Mistake("{} can not be made: {}".format(name, one_line(error))) from error
    if not isinstance(simulator, Simulator):
        raise Mistake("{} gave {} and no Simulator".format(name, type(simulator).__name__))
    return simulator


def kinds() -> List[str]:
    """What `KIND` can be here."""
    return sorted({*BUILT_IN, PYTHON, *_entry_points()})


def _factory(name: SimulatorName) -> Callable[..., Any]:
    if name.kind == PYTHON:
        module, colon, rest = name.id.partition(":")
        if not (colon and rest):
            raise Mistake("{}: expected python:MODULE:CALLABLE, such as python:my_package.worlds:make".format(name))
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())
        return _object(name, module, rest.partition(":")[0])
    path = BUILT_IN.get(name.kind) or _entry_points().get(name.kind)
    if path is None:
        near = difflib.get_close_matches(name.kind, kinds(), n=1)
        raise Mistake("{}: there is no kind of simulator `{}` here; {}".format(
            name, name.kind, "did you mean `{}`?".format(near[0]) if near else "there are " + ", ".join(kinds())))
    module, _, attribute = path.partition(":")
    return _object(name, module.strip(), attribute.partition("[")[0].strip())


def _object(name: SimulatorName, module: str, attribute: str) -> Callable[..., Any]:
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise Mistake("{}: there is no module {} in {}".format(name, error.name, sys.executable)) from error
    except AttributeError as error:
        raise Mistake("{}: {}".format(name, one_line(error))) from error
    except (Exception, SystemExit) as error:  # an import may run anything
        raise Mistake("{}: importing {} raised {}".format(name, module, one_line(error))) from error
    if not callable(found):
        raise Mistake("{}: {} of {} can not be called".format(name, attribute, module))
    return found  # type: ignore[no-any-return]


def _entry_points() -> Dict[str, str]:
    """Name -> `module:callable` of what packages here offer."""
    every: Any = metadata.entry_points()
    found = every.select(group=GROUP) if hasattr(every, "select") else every.get(GROUP, ())
    return {point.name: point.value for point in found}
