"""The command line. `main` is the entry point of `cosmos-actor`; it imports the rest: a missing extra is one line."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from cosmos_actor.python_versions import PythonTooOld, need

IN_A_SIMULATOR = ("attach", "sim")
"""Commands that run in a simulator's own environment, on Python 3.8 and without any extra."""
NEEDS = ("typer", "rich", "pydantic", "pydantic_core", "tomlkit", "tomli", "psutil")
NOT_HERE = ("{} is not in the small wheel of cosmos-actor, which has `attach` and `sim` for a simulator's environment; "
            "in another one, of Python 3.10 or newer, install all of it: pip install 'cosmos-actor[cli]'")


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 only on success, 2 for what the caller can put right."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if words and words[0] in IN_A_SIMULATOR:
            from cosmos_actor.simulator_bridge.cli import main as in_a_simulator
            return in_a_simulator(words)
        if find_spec("cosmos_actor.cli.app") is None:  # in the wheel that `sim wheel` writes
            return _refuse(NOT_HERE.format(f"`{words[0]}`" if words else "the rest"))
        need("cosmos_actor.cli")
        from cosmos_actor.cli.app import run
        return run(arguments)
    except KeyboardInterrupt:  # while it imports: a command that runs has its own answer
        return 130
    except PythonTooOld as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in NEEDS:
            raise
        return _refuse(f"{error.name} is not installed; the command line needs it: pip install 'cosmos-actor[cli]'")


def _refuse(line: str) -> int:
    sys.stderr.write(f"error: {line}\n")
    return 2
