"""What a job can be given from elsewhere, by name, beside simulators (`simulator_bridge/plugins.py`) and tasks.

    NAME                        built in, or an entry point of the registry's group
    package.module:attribute    whatever can be imported here and called, also from the current folder

`python -m cosmos_actor.roles.plugins SETTING=NAME …` loads each and calls none: how `check` asks another interpreter.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from cosmos_actor.actors.errors import BadValue, NotFound, UnknownName, UserError
from cosmos_actor.simulator_bridge.mistakes import one_line

MISTAKE = 2
"""Exit code: only a person can put it right."""


@dataclass(frozen=True)
class Registry:
    """Callables of one kind by name. What is built in goes before entry points; a name with a colon is a path."""

    what: str
    setting: str
    group: str
    built_in: Mapping[str, str] = field(default_factory=dict)

    def load(self, name: str) -> Callable[..., Any]:
        """Raises UnknownName, NotFound or BadValue: one line that names the setting."""
        module_name, _, attribute = self.path(name).partition(":")
        found = self._attribute(self._module(name, module_name), attribute)
        if not callable(found):
            raise BadValue(f"{attribute} of {module_name} can not be called, it is {found!r:.40}", setting=self.setting)
        return found  # type: ignore[no-any-return]

    def call(self, name: str, plug_in: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """What it gives. Whatever it raises is a BadValue with its line; its own UserError rises as it is."""
        try:
            return plug_in(*arguments, **more)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # somebody else's code
            raise BadValue(f"the {self.what} {name} raised {one_line(error)}", setting=self.setting) from error

    def path(self, name: str) -> str:
        """`module:attribute` of a name. Raises UnknownName with the nearest one."""
        if ":" in name:
            return name
        found = self.built_in.get(name) or self._entry_points().get(name)
        if found is None:
            known = sorted({*self.built_in, *self._entry_points()})
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known) or 'none'}"
            raise UnknownName(f"there is no {self.what} `{name}` here; {hint}, or package.module:name of one's own",
                              setting=self.setting)
        return found

    def _entry_points(self) -> dict[str, str]:
        """Name -> `module:attribute` of what packages here offer; extras in brackets do not matter."""
        return {point.name: point.value.partition("[")[0].replace(" ", "")
                for point in metadata.entry_points(group=self.group)}

    def _module(self, name: str, module_name: str) -> Any:
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise NotFound(f"{name}: there is no module {error.name} in {sys.executable}",
                           setting=self.setting) from error
        except (Exception, SystemExit) as error:  # an import may run anything
            raise NotFound(f"{name}: importing {module_name} raised {one_line(error)}",
                           setting=self.setting) from error

    def _attribute(self, module: Any, path: str) -> Any:
        found = module
        for part in path.split("."):
            if not hasattr(found, part):
                near = difflib.get_close_matches(part, dir(found), n=1)
                hint = f"; did you mean `{near[0]}`?" if near else ""
                raise NotFound(f"{module.__name__} has no `{path}`{hint}", setting=self.setting)
            found = getattr(found, part)
        return found


SOURCES = Registry("source", "sim.source", "cosmos_actor.sources",
                   {"in_turn": "cosmos_actor.roles.unit_source:in_turn"})
DRIVERS = Registry("driver", "sim.driver", "cosmos_actor.drivers",
                   {"collector": "cosmos_actor.roles.collector:Collector"})
SINKS = Registry("sink", "sim.sinks", "cosmos_actor.sinks")
REGISTRIES = {registry.setting: registry for registry in (SOURCES, DRIVERS, SINKS)}


def main(words: Sequence[str]) -> int:
    """0, or 2 after a line on stderr for each that can not be loaded."""
    wrong = 0
    for word in words:
        setting, _, name = word.partition("=")
        try:
            REGISTRIES[setting].load(name)
        except UserError as error:
            wrong = MISTAKE
            print(f"error: {error}", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
